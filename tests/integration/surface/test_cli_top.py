"""`refitd top`: what `refitd status` shows, live."""

import json

from refitd_client.contract.states import EngineState, Standing
from support.command_line import refitd
from support.stand_in_service import make_engine, make_run, make_version, stand_in


def test_where_stdout_is_no_terminal_it_looks_once_as_status_does() -> None:
    with stand_in() as service:
        service.engines = [make_engine("gpu-0"), make_engine("gpu-1", state=EngineState.UNREACHABLE)]
        service.versions = [make_version(2)]
        service.runs = [make_run(standing=Standing.TROUBLED, headline="1 of 2.", reasons=["gpu-1 is UNREACHABLE"])]
        status = refitd("status", "--url", service.url)
        for words in (("top",), ("top", "--once")):
            shown = refitd(*words, "--url", service.url)
            assert (shown.exit_code, shown.stdout) == (0, status.stdout)
        assert json.loads(refitd("top", "--json", "--url", service.url).stdout)["runs"][0]["headline"] == "1 of 2."
