"""Refused notices in the log of decisions: the trainer has the answer, and an operator looks at the log.

A trainer sends a notice again and again, so that a reason is written down once in a while for each run. Nothing is
written of the notice by which `refitd doctor` asks whether notices are taken: it is to be refused, and doctor says what
the answer means.
"""

from refitd.problem import ProblemError, Slug
from refitd.state.store import Store
from refitd_client.contract.naming import InvalidNameError, check_run
from refitd_client.contract.wire import Notice

SAID_AGAIN_SECONDS = 600.0  # until the same reason is written down again for a run
DOCTORS_RUN = "refitd-doctor"  # which doctor names in its own
MOST = 64  # reasons in that time: runs' names are the senders', and the log is kept
_NO_REFUSALS = frozenset({Slug.NOT_READY})  # it is asked to come again


class RefusedNotices:
    """Writes into the log why notices were refused."""

    def __init__(self, store: Store) -> None:
        """Nothing was refused yet."""
        self._store = store
        self._told: dict[tuple[str, Slug], float] = {}  # monotonic seconds, the oldest first
        self._untold = 0

    def tell(self, notice: Notice, error: ProblemError) -> None:
        """Write a refusal down, unless this run had one of its kind a short while ago.

        Args:
            notice: the notice.
            error: why it is refused.
        """
        if error.kind in _NO_REFUSALS or notice.run == DOCTORS_RUN:
            return
        now = self._store.clock.monotonic()
        self._told = {key: since for key, since in self._told.items() if now - since < SAID_AGAIN_SECONDS}
        key = (notice.run, error.kind)
        if key in self._told or len(self._told) >= MOST:
            self._untold += 1
            return
        self._told[key] = now
        try:
            kind, subject = "run", check_run(notice.run)
        except InvalidNameError:
            kind, subject = "root", "root"  # a name that no run can have is no subject, and stands in the reason
        more = f" (and {self._untold} more since the last of these entries)" if self._untold else ""
        self._untold = 0
        text = f"the notice of step {notice.step} was refused: {error.detail}{more}"
        self._store.say(kind, subject, text, is_fault=True, problem=error.kind.slug)
