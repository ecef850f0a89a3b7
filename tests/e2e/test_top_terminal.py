"""`refitd top` in a real terminal: it is drawn, follows its size, and ends quietly."""

import re
import signal
import sys
from contextlib import ExitStack

import pytest

from refitd_client.contract.states import EngineState, Standing
from support.stand_in_service import make_engine, make_run, make_version, stand_in
from support.terminal import terminal

pytestmark = [pytest.mark.e2e]


@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}])
def test_it_is_live_follows_the_size_of_its_window_and_ends_with_ctrl_c(environment: dict[str, str]) -> None:
    with stand_in() as service:
        service.runs, service.engines, service.versions = [make_run()], [make_engine("gpu-0")], [make_version(2)]
        words = ["-m", "refitd", "top", "--interval", "0.1", "--url", service.url]
        with terminal(sys.executable, *words, **environment) as shown:
            colours = re.search(r"\x1b\[[0-9;]*3[0-9]", shown.until("2 of 2 engines"))
            assert (colours is None) is bool(environment)
            service.runs = [make_run(target=None, headline="Something else.")]
            shown.until("Something else")
            shown.resize(10, 40)
            shown.until("Something else")
            service.runs = []
            shown.until("gpu-0")
            shown.child.send_signal(signal.SIGINT)
            assert shown.child.wait(10) == 0
            assert "Traceback" not in shown.until(r"\x1b\[\?1049l")  # back to what was there before


def test_trouble_is_in_the_first_lines_of_a_small_window_and_a_lost_service_is_said_above_what_was_last_known() -> None:
    with ExitStack() as ends:
        service = ends.enter_context(stand_in())
        service.engines = [make_engine(f"gpu-{number:03d}") for number in range(200)]
        service.engines.append(make_engine("zebra", state=EngineState.TAINTED))
        service.versions = [make_version(2)]
        service.runs = [make_run(standing=Standing.TROUBLED, headline="1 is troubled.")]
        words = ["-m", "refitd", "top", "--interval", "0.1", "--url", service.url]
        with terminal(sys.executable, *words) as shown:
            shown.resize(12, 60)
            assert "▲ TROUBLED" in shown.until("zebra")
            ends.close()
            assert "zebra" in shown.until(r"(?s)not live since .*zebra")
