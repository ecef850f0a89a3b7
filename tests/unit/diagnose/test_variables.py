"""A variable whose name is nearly a setting's is not passed over in silence."""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from refitd import app
from refitd.preflight import unread, why_unread
from refitd_doctor.finding import CheckName, CheckVerdict
from refitd_doctor.service import judge_variables

TREE = Path(__file__).parents[3]
READERS = ("client", "service", "deploy", "docs", "examples", "docker-compose.yml")
KUBERNETES = ("REFITD_SERVICE_HOST", "REFITD_HUB_SERVICE_PORT_HTTP", "REFITD_HUB_PORT", "REFITD_PORT_8700_TCP_ADDR")


def test_a_variable_that_no_setting_has_is_named_with_the_setting_that_was_meant() -> None:
    environment = {"REFITD_KEEPLAST": "the-secret", "REFITD_WORDS": "2", "REFITD_KEEP_LAST": "4", "HOME": "/root"}
    assert unread(environment) == {"REFITD_KEEPLAST": "REFITD_KEEP_LAST", "REFITD_WORDS": None}
    assert (
        why_unread(environment) == "no setting is called REFITD_KEEPLAST (did you mean REFITD_KEEP_LAST?), REFITD_WORDS"
    )
    near, other = judge_variables(environment)
    assert (near.check, near.verdict, near.fix) == (
        CheckName.SETTINGS,
        CheckVerdict.WARNING,
        "did you mean REFITD_KEEP_LAST?",
    )
    assert other.subject == "REFITD_WORDS"
    assert "settings.md" in str(other.fix)


def test_a_variable_of_the_plugin_with_a_slip_in_its_name_is_named_with_the_one_that_was_meant() -> None:
    environment = {"REFITD_SGLANG_ROOTT": "/r", "REFITD_VLM_ROOT": "/r", "REFITD_SGLANG_STAGE": "auto"}
    assert unread(environment) == {"REFITD_SGLANG_ROOTT": "REFITD_SGLANG_ROOT", "REFITD_VLM_ROOT": "REFITD_VLLM_ROOT"}


def test_where_all_variables_are_read_nothing_is_said() -> None:
    assert why_unread({"REFITD_KEEP_LAST": "4", "refitd_port": "1", "REFITD": "x"}) is None
    assert list(judge_variables({})) == []


def test_a_service_that_starts_says_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFITD_KEEPLAST", "4")
    with capture_logs() as lines:
        app._warn()
    (said,) = [line for line in lines if line["event"] == "a variable does nothing"]
    assert (said["log_level"], "REFITD_KEEPLAST (did you mean REFITD_KEEP_LAST?)" in said["reason"]) == (
        "warning",
        True,
    )


@pytest.mark.parametrize("name", KUBERNETES)
def test_what_kubernetes_sets_for_a_service_of_that_name_is_no_slip(name: str) -> None:
    assert unread({name: "tcp://10.0.0.1:8700"}) == {}


def _named_in(places: Iterable[str]) -> set[str]:
    found: set[str] = set()
    for place in places:
        path = TREE / place
        for file in [path] if path.is_file() else path.rglob("*"):
            if file.suffix in {".py", ".md", ".yaml", ".yml", ".service", ".sbatch", ".sh", ".env", ".toml"}:
                found |= set(re.findall(r"REFITD_[A-Z0-9_]*[A-Z0-9]", file.read_text(errors="replace")))
    return found


def test_every_variable_that_the_product_and_its_pages_name_is_known() -> None:
    """Also those that no setting has: the SDK's, the plugin's and the deployments'."""
    named = _named_in(READERS)
    assert {"REFITD_SPOOL", "REFITD_FRONT_TOKEN", "REFITD_SGLANG_STAGE", "REFITD_JOB_TOKEN"} <= named
    assert unread(dict.fromkeys(named, "")) == {}
