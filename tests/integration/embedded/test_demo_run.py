"""The demo's options, what it refuses before anything is started, and what it needs."""

import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from refitd_embedded.demo import DemoOptions, main
from refitd_embedded.demo.__main__ import arguments
from refitd_embedded.demo.run import ending_on_signals


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"steps": 0}, "--steps is 0"),
        ({"service_url": "http://127.0.0.1:1"}, "belong together"),
        ({"engines": ["http://127.0.0.1:1"], "root": Path("root")}, "belong together"),
        ({"model": Path("nowhere")}, "nowhere"),
    ],
)
def test_options_that_make_no_run_are_explained(
    options: dict[str, Any], reason: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(DemoOptions(workdir=tmp_path, **options)) == 2
    assert reason in capsys.readouterr().err


def test_a_line_says_what_is_done_before_torch_is_imported_and_processes_start(tmp_path: Path) -> None:
    look = (
        "import sys, refitd_embedded.demo as demo; sys.modules['torch'] = None\n"
        "try: demo.main(demo.DemoOptions())\nexcept ImportError: sys.exit(7)"
    )
    ended = subprocess.run([sys.executable, "-c", look], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 7
    assert ended.stderr == "refitd demo: a small model will learn from rollouts of two engines on this machine …\n"
    assert ended.stdout == ""  # which is for rows, in JSON as well


def test_the_flags_are_the_options_of_main() -> None:
    assert vars(arguments([])) == asdict(DemoOptions())
    attached = arguments(["--service-url", "http://r", "--engines", "http://a,http://b", "--root", "/data"])
    assert attached.engines == ("http://a", "http://b")
    assert arguments(["--no-publish"]).publish is False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_would_end_the_process_unwinds_it_first(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_DFL)  # whoever started the tests may have had it ignored, as nohup does
    try:
        with pytest.raises(SystemExit) as ended, ending_on_signals():
            signal.raise_signal(number)
        assert ended.value.code == 128 + number
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_a_signal_that_is_ignored_stays_ignored_as_nohup_wants_it() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ending_on_signals():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
