"""schemathesis over the OpenAPI document, against a real service: no request makes it fail, no answer is another than
the document says. Derandomized: the same requests each time.
"""

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import checks, openapi

from refitd.api.auth import HEALTH
from support.checkpoints import publish, tensors, write_model
from support.servers import RefitdServer

pytestmark = [pytest.mark.e2e]

EXAMPLES = 25  # of each operation and each kind
ENDLESS = "/v1/events"
TOKEN = {"Authorization": "Bearer write"}
checks.load_all_checks()
CHECKS = checks.CHECKS.get_by_names(
    [
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_headers_conformance",
        "response_schema_conformance",
        "unsupported_method",
        "allow_header_conformance",
        "ignored_auth",
    ]
)
KNOWN = {"version_id": "run~v000001", "engine_id": "127.0.0.1:9", "subject": "run~v000001"}


@pytest.fixture
def service(tmp_path: Path) -> Generator[RefitdServer]:
    """A service with a version, an engine that is not there, and tokens for everything."""
    root = tmp_path / "root"
    publish(root, "run", 1, tensors(1))
    for name in ("write", "read"):
        (tmp_path / name).write_text(name)
    flags = ["--base-model", str(write_model(tmp_path / "base")), "--scan-interval", "0.1"]
    flags += ["--token-file", str(tmp_path / "write"), "--read-token-file", str(tmp_path / "read")]
    with RefitdServer(tmp_path, root, ["http://127.0.0.1:9"], *flags) as server:
        yield server
        assert server.is_running
        assert "Traceback" not in server.log.read_text()


def aim(case: schemathesis.Case, number: int) -> None:
    """Every second request is about something that exists. Nobody waits."""
    for name, known in KNOWN.items():
        if number % 2 and name in case.path_parameters:
            case.path_parameters[name] = known
    if number % 2 and isinstance(case.body, dict) and "step" in case.body:
        case.body |= {"run": "run", "step": 1}
    if "/wait" in case.path and isinstance(case.query, dict):
        case.query["timeout"] = 0


@pytest.mark.timeout(600)
@pytest.mark.thorough
def test_no_request_within_or_beyond_the_document_breaks_the_service_or_the_document(service: RefitdServer) -> None:
    document = httpx.get(f"{service.url}/openapi.json", headers=TOKEN, trust_env=False).json()
    assert set(document["paths"]) > HEALTH
    asked: Counter[str] = Counter()
    with requests.Session() as session:
        session.trust_env = False
        for found in openapi.from_dict(document).exclude(path=ENDLESS).get_all_operations():
            operation = found.ok()
            for mode in schemathesis.GenerationMode:
                ask = asking(service, operation.as_strategy(generation_mode=mode), session, asked)
                with suppress(Unsatisfiable):  # what has no parameters has none that could be wrong
                    ask()
    assert len(asked) == sum(len(methods) for path, methods in document["paths"].items() if path != ENDLESS)
    assert asked.total() > 300, asked


def asking(service: RefitdServer, cases: Any, session: requests.Session, asked: Counter[str]) -> Callable[[], None]:
    """A property: whatever is asked, the answer is one that the document describes."""

    @given(case=cases)
    @settings(
        derandomize=True,
        database=None,
        max_examples=EXAMPLES,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def ask(case: schemathesis.Case) -> None:
        asked[f"{case.method} {case.path}"] += 1
        aim(case, asked.total())
        # A gate that is shut answers 503, as the document says: no other status, and no 500.
        fits = [each for each in CHECKS if each.__name__ != "not_a_server_error" or not case.path.endswith("/gate")]
        case.call_and_validate(base_url=service.url, session=session, headers=TOKEN, checks=fits, timeout=30)

    return ask
