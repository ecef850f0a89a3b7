"""How much a notice may bring that is kept: it stays in memory and in the journal as long as its version. Pure."""

import re
from collections.abc import Mapping

from refitd.policy.metadata import LIMITS, fits
from refitd.problem import Kind, ProblemError
from refitd_client.contract.states import Kind as VersionKind
from refitd_client.contract.wire import Notice

MAX_BASE = 512
MAX_PATH = 4096
MAX_FAILED = 500
MAX_DIGEST = 200
MAX_ROOT = 64
MAX_PUBLISH_MS = 86_400_000.0  # a day
_OFFER = re.compile(r"\.offer-[0-9a-f]{16}")


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
    if len(notice.digest or "") > MAX_DIGEST or len(notice.root or "") > MAX_ROOT:
        raise ProblemError(Kind.BAD_REQUEST, f"digest has at most {MAX_DIGEST} characters, and root {MAX_ROOT}")
    if notice.publish_ms is not None and not 0 <= notice.publish_ms <= MAX_PUBLISH_MS:
        raise ProblemError(Kind.BAD_REQUEST, f"publish_ms is between 0 and {MAX_PUBLISH_MS:g} milliseconds")


def check_handover(notice: Notice) -> None:
    """Refuse what says of memory what only a hand-over can say, and a hand-over that says nothing.

    Raises:
        ProblemError: it says what is wrong.
    """
    said = [each for each in (notice.offer, notice.failed) if each is not None]
    if len(said) != (notice.kind is VersionKind.HANDOVER):
        raise ProblemError(Kind.BAD_REQUEST, "a hand-over names an offer, or says why it failed; nothing else does")
    if notice.offer is not None and not _OFFER.fullmatch(notice.offer):
        raise ProblemError(Kind.BAD_REQUEST, f"offer {notice.offer[:50]!a} is no name of an offer's file")
    if notice.failed is not None and len(notice.failed) > MAX_FAILED:
        raise ProblemError(Kind.BAD_REQUEST, f"failed is longer than {MAX_FAILED} characters")


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
