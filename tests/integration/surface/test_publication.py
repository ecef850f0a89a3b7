"""The notice and the wait: a service that is down, forgetful or says no never costs a version."""

import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import refitd_client.publish.publication
from refitd_client import (
    ConflictError,
    EngineFailedError,
    InvalidRequestError,
    Publication,
    PublishOptions,
    RefitError,
    ServiceProblemError,
    ServiceUnreachableError,
    UnauthorizedError,
    VersionFailedError,
    VersionLostError,
    VersionRejectedError,
    WaitTimeoutError,
    WeightPublisher,
)
from refitd_client.contract.states import EngineState, VersionState, WaitOutcome
from refitd_client.contract.wire import EngineOnVersion
from refitd_client.errors import Fault
from support import published
from support.scripted_service import Answer, Request, ScriptedService, problem, version, waited
from support.sockets import free_port

WEIGHTS = {"a": np.zeros(1, np.float32)}

GOOD = EngineOnVersion(id="e1", state=EngineState.IN_SYNC, step=1, serves=True)
OTHER = EngineOnVersion(id="e4", state=EngineState.IN_SYNC, step=1)  # of another generation
LATE = EngineOnVersion(id="e2", state=EngineState.UPDATING, step=0, reason="loads since 9 s")
TAINTED = EngineOnVersion(id="e3", state=EngineState.TAINTED, step=None, reason="the reply was lost")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refitd_client.publish.publication, "NOTICE_DEADLINE", 0.2)


def _publish(root: Path, service_url: str | None, **options: Any) -> Publication:
    with WeightPublisher(root, "run", service_url, options=PublishOptions(**options)) as publisher:
        return publisher.publish(WEIGHTS, step=1, metadata={"loss": "1"})


def _answers(notice: Answer, wait: Callable[[int], Answer] | Answer | None = None) -> Callable[[list[Request]], Answer]:
    """Answer notices and waits; a function of the number of waits so far may answer each wait differently."""

    def answer(requests: list[Request]) -> Answer:
        if requests[-1].method == "POST":
            return notice
        assert wait is not None
        return wait(sum(request.method == "GET" for request in requests)) if callable(wait) else wait

    return answer


ACCEPTED: Answer = (202, version(VersionState.VALIDATING))


def test_the_notice_names_the_version_relative_to_the_root(tmp_path: Path) -> None:
    """The service may have mounted it elsewhere. The token goes along."""
    with ScriptedService(_answers(ACCEPTED)) as service:
        publication = _publish(tmp_path, service.url, token="secret")
    (request,) = service.requests
    assert (request.method, request.path, request.authorization) == ("POST", "/v1/versions", "Bearer secret")
    assert request.body["path"] == "run/v000001"
    assert (request.body["run"], request.body["step"], request.body["metadata"]) == ("run", 1, {"loss": "1"})
    assert publication.notice_error is None
    assert publication.timings.keys() == {"write", "sync", "commit", "notice"}


def test_a_version_stands_while_the_service_is_down(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With a warning and the reason; training goes on."""
    with caplog.at_level(logging.WARNING, "refitd_client"):
        publication = _publish(tmp_path, f"http://127.0.0.1:{free_port()}")
    assert isinstance(publication.notice_error, ServiceUnreachableError)
    published.check(publication.path)
    assert "run~v000001 is published, and the notice did not reach the service" in caplog.text


@pytest.mark.parametrize("answer", [problem(507, "disk-full"), problem(500, "internal"), (200, "not refitd")])
def test_a_service_in_trouble_does_not_stop_training(tmp_path: Path, answer: Answer) -> None:
    """It is the service's fault, and may pass."""
    with ScriptedService(_answers(answer)) as service:
        publication = _publish(tmp_path, service.url)
    assert publication.notice_error is not None
    assert publication.notice_error.fault is Fault.SERVICE


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (problem(401, "unauthorized"), UnauthorizedError),
        (problem(409, "conflict"), ConflictError),
        (problem(422, "invalid"), InvalidRequestError),
    ],
)
def test_a_refused_notice_is_raised_with_the_version_that_stands(
    tmp_path: Path, answer: Answer, kind: type[ServiceProblemError]
) -> None:
    """The trainer has to change something; its version is not lost for it, and the run goes on after it."""
    with ScriptedService(_answers(answer)) as service, WeightPublisher(tmp_path, "run", service.url) as publisher:
        with pytest.raises(kind, match="because") as caught:
            publisher.publish(WEIGHTS, step=1)
        with pytest.raises(kind):
            publisher.publish(WEIGHTS, step=2)
    assert caught.value.publication is not None
    published.check(caught.value.publication.path)
    assert published.versions(tmp_path / "run") == ["v000001", "v000002"]


@pytest.mark.parametrize(
    ("about", "kind", "fault"),
    [
        ({"state": VersionState.REJECTED, "reason": "shape of w"}, VersionRejectedError, Fault.CHECKPOINT),
        ({"state": VersionState.LOST, "reason": "w is gone"}, VersionLostError, Fault.CHECKPOINT),
        ({"barred": True, "reason": "rolled back from", "engines": [TAINTED]}, VersionFailedError, Fault.CHECKPOINT),
        ({"engines": [GOOD, TAINTED]}, EngineFailedError, Fault.ENGINE),
    ],
)
def test_a_failure_is_raised_by_whose_fault_it_is(
    tmp_path: Path, about: dict[str, Any], kind: type[RefitError], fault: Fault
) -> None:
    """With the service's reason."""
    with ScriptedService(_answers(ACCEPTED, waited(WaitOutcome.FAILED, **about))) as service:
        publication = _publish(tmp_path, service.url)
        with pytest.raises(RefitError, match=about.get("reason", "e3 is TAINTED")) as caught:
            publication.wait(30)
    assert type(caught.value) is kind
    assert caught.value.fault is fault
    if isinstance(caught.value, EngineFailedError):
        assert caught.value.engines == (TAINTED,)


@pytest.mark.parametrize(
    ("about", "says", "fault"),
    [
        ({"engines": [GOOD, OTHER]}, "waiting for: e4 is IN_SYNC$", Fault.ENGINE),
        ({"engines": [GOOD, LATE]}, r"waiting for: e2 is UPDATING \(loads since 9 s\)", Fault.ENGINE),
        ({"engines": []}, "no engine of the run is known", Fault.SERVICE),
        ({"state": VersionState.VALIDATING}, "is still VALIDATING", Fault.SERVICE),
    ],
)
def test_a_wait_that_runs_out_names_who_is_late(tmp_path: Path, about: dict[str, Any], says: str, fault: Fault) -> None:
    """And nobody else."""
    with ScriptedService(_answers(ACCEPTED, waited(WaitOutcome.PENDING, **about))) as service:
        publication = _publish(tmp_path, service.url)
        with pytest.raises(WaitTimeoutError, match=says) as caught:
            publication.wait(0)
    assert caught.value.fault is fault
    late = [engine.id for engine in caught.value.laggards]
    assert late == [engine.id for engine in about.get("engines", []) if engine is not GOOD]


def test_wait_waits_for_a_service_that_does_not_know_the_version_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has just started and has not listed the root: it finds the version by itself."""
    monkeypatch.setattr("refitd_client.http.client.time.sleep", lambda _: None)
    answers = [problem(503, "not-ready"), problem(503, "not-ready"), waited(WaitOutcome.SERVED)]
    with ScriptedService(_answers(ACCEPTED, lambda count: answers[count - 1])) as service:
        assert _publish(tmp_path, service.url).wait(30).outcome is WaitOutcome.SERVED
    assert [request.method for request in service.requests] == ["POST", "GET", "GET", "GET"]


def test_a_publication_can_be_sent_to_another_process_and_does_not_show_its_token(tmp_path: Path) -> None:
    """Trainers wait in actors."""
    with ScriptedService(_answers(ACCEPTED, waited(WaitOutcome.SERVED))) as service:
        publication = _publish(tmp_path, service.url, token="secret")
        copy = pickle.loads(pickle.dumps(publication))  # noqa: S301 - its own bytes
        assert copy == publication
        assert "secret" not in repr(copy)
        assert copy.wait(30).outcome is WaitOutcome.SERVED
    assert service.requests[-1].authorization == "Bearer secret"
