"""The files of what was taken from memory: they follow, and from then on it can be put back from them.

They are looked for and opened in a thread as soon as they are there. To do it when the next version is prepared would
have its trainer wait: a look at a folder is some hundred steps, each of which waits for SGLang's loop.
"""

import logging
import threading
import time
from collections.abc import Callable

from refitd_plugin.turns import short_turns

logger = logging.getLogger("refitd_plugin")

_LOOK_SECONDS = 0.1
_LESS_OFTEN = 2.0  # where opening them failed: it says why in the log, and the next prepare says it to the service


class Following:
    """`look` opens the files if they are there, and says whether there is nothing to wait for any more."""

    def __init__(self, look: Callable[[], bool]) -> None:
        """No thread yet."""
        self._look = look
        self._wanted = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Something was taken from memory."""
        self._wanted.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="refitd-following", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            while not self._is_done():
                time.sleep(_LOOK_SECONDS)

    def _is_done(self) -> bool:
        try:
            with short_turns():
                return self._look()
        except Exception as error:  # a thread that ends would leave the next ones to be waited for
            logger.warning("the files of what is served cannot be opened yet: %s", error)
            time.sleep(_LESS_OFTEN)
            return False
