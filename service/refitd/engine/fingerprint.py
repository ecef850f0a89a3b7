"""Fingerprints of what an engine holds: who computed them, and so which can be held against each other. Pure."""

BY_PLUGIN = "plugin:"
"""What those begin with that refitd's plugin has computed; the others are made of SGLang's own checksums."""


def comparable(some: str, other: str | None) -> bool:
    """Whether two fingerprints were computed alike."""
    return other is not None and some.startswith(BY_PLUGIN) == other.startswith(BY_PLUGIN)
