"""`refitd top` in a real terminal: it is drawn, follows its size, and ends quietly."""

import re
import signal
import sys

import pytest

from support.stand_in_service import make_engine, make_run, stand_in
from support.terminal import terminal

pytestmark = [pytest.mark.e2e]


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}])
def test_it_is_live_follows_the_size_of_its_window_and_ends_with_ctrl_c(environment: dict[str, str]) -> None:
    with stand_in() as service:
        service.runs, service.engines = [make_run()], [make_engine("gpu-0")]
        words = ["-m", "refitd", "top", "--interval", "0.1", "--url", service.url]
        with terminal(sys.executable, *words, **environment) as shown:
            colours = re.search(r"\x1b\[[0-9;]*3[0-9]", shown.until("All 2 engines serve step 2"))
            assert (colours is None) is bool(environment)
            service.runs = [make_run(headline="Something else.")]
            shown.until("Something else")
            shown.resize(10, 40)
            shown.until("Something else")
            service.runs = []
            shown.until("gpu-0")
            shown.child.send_signal(signal.SIGINT)
            assert shown.child.wait(10) == 0
            assert "Traceback" not in shown.until(r"\x1b\[\?1049l")  # back to what was there before
