"""How much a notice may bring that is kept: it stays in memory and in the journal as long as its version. Pure."""

from collections.abc import Mapping

from refitd.catalog.metadata import LIMITS, fits
from refitd.problem import Kind, ProblemError
from refitd_client.contract.wire import Notice

MAX_BASE = 512
MAX_PATH = 4096
MAX_PUBLISH_MS = 86_400_000.0  # a day


def check_caps(notice: Notice) -> None:
    """Refuse what is too much.

    Raises:
        ProblemError: it says what is, and how much may be.
    """
    check_metadata(notice.metadata)
    if notice.path is not None and len(notice.path) > MAX_PATH:
        raise ProblemError(Kind.BAD_REQUEST, f"path is longer than {MAX_PATH} characters")
    if notice.base is not None and len(notice.base) > MAX_BASE:
        raise ProblemError(Kind.BAD_REQUEST, f"base is a version's id, of at most {MAX_BASE} characters")
    if notice.publish_ms is not None and not 0 <= notice.publish_ms <= MAX_PUBLISH_MS:
        raise ProblemError(Kind.BAD_REQUEST, f"publish_ms is between 0 and {MAX_PUBLISH_MS:g} milliseconds")


def check_metadata(metadata: Mapping[str, str]) -> None:
    """Refuse what is too much, in one notice or in several together.

    Raises:
        ProblemError: it says how much may be.
    """
    if not fits(metadata):
        raise ProblemError(
            Kind.BAD_REQUEST,
            f"the metadata of a version has at most {LIMITS}: put the rest into a file beside the weights",
        )
