"""Why a copy could not be written. Each message is a sentence; the copy is worth nothing then."""


class CopyError(Exception):
    """The base of them all."""


class MisfitError(CopyError):
    """What came out is not what the deltas promise, or they do not fit: trying again from there is in vain."""


class NoRoomError(CopyError):
    """The disk is full."""


class SourceChangedError(CopyError):
    """The files that it is made from are not those that were checked."""
