"""How much a notice may bring that is kept: it stays in memory and in the journal as long as its version. Pure."""

from refitd.problem import Kind, ProblemError
from refitd_client.contract.wire import Notice

MAX_ENTRIES = 64
MAX_CHARACTERS = 16 * 2**10
MAX_BASE = 512
MAX_PATH = 4096


def check_caps(notice: Notice) -> None:
    """Refuse what is too much.

    Raises:
        ProblemError: it says what is, and how much may be.
    """
    size = sum(len(key) + len(value) for key, value in notice.metadata.items())
    if len(notice.metadata) > MAX_ENTRIES or size > MAX_CHARACTERS:
        raise ProblemError(
            Kind.BAD_REQUEST,
            f"metadata has at most {MAX_ENTRIES} entries and {MAX_CHARACTERS} characters: put the rest into a file "
            "beside the weights",
        )
    if notice.path is not None and len(notice.path) > MAX_PATH:
        raise ProblemError(Kind.BAD_REQUEST, f"path is longer than {MAX_PATH} characters")
    if notice.base is not None and len(notice.base) > MAX_BASE:
        raise ProblemError(Kind.BAD_REQUEST, f"base is a version's id, of at most {MAX_BASE} characters")
