"""A service that is down holds one step of a trainer, and is logged once, however many steps follow."""

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from refitd_client import WeightPublisher
from refitd_client.contract.states import VersionState
from refitd_client.contract.wire import Problem
from support.scripted_service import Answer, Request, ScriptedService, version

DOWN: Answer = (503, Problem(type="about:blank", title="starts", status=503, detail="starts"))
WEIGHTS = {"w": torch.zeros(4)}


class _Service:
    """Answers notices as it is set, and knows no versions."""

    def __init__(self) -> None:
        self.is_down = True
        self.notices = self.questions = 0

    def __call__(self, requests: Sequence[Request]) -> Answer:
        if requests[-1].method != "POST":
            self.questions += 1
            return DOWN
        self.notices += 1
        return DOWN if self.is_down else (202, version(VersionState.VALIDATING))


def test_the_notice_of_the_step_after_one_without_an_answer_is_sent_once_until_one_is_answered(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers = _Service()
    sent: list[int] = []
    with (
        caplog.at_level(logging.INFO, "refitd_client"),
        ScriptedService(answers) as service,
        WeightPublisher(tmp_path, "run", service.url) as publisher,
    ):
        for step, answers.is_down in enumerate((True, True, True, False, True), start=1):
            before = answers.notices
            publisher.publish(WEIGHTS, step=step)
            sent.append(answers.notices - before)
    assert sent[1:4] == [1, 1, 1]
    assert min(sent[0], sent[4]) > 1, "a service that answered before is waited for"
    warned = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert ["run~v000001" in warned[0], "run~v000005" in warned[1], len(warned)] == [True, True, 2]
    assert "run~v000004 is published, and the service answers again" in caplog.text


def test_a_step_with_a_transport_waits_once_and_warns_once_for_a_service_that_is_down(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers = _Service()
    with (
        caplog.at_level(logging.WARNING, "refitd_client"),
        ScriptedService(answers) as service,
        WeightPublisher(tmp_path, "run", service.url) as publisher,
    ):
        for step in (1, 2):
            publisher.publish(WEIGHTS, step=step, transport="auto").committed()
    assert answers.notices == 2, "the question who can receive has found it down before"
    assert len(caplog.records) == 1, caplog.text
    assert "the version goes by its files" in caplog.text


def test_a_step_with_deltas_asks_a_service_that_is_down_once_what_engines_serve(tmp_path: Path) -> None:
    answers = _Service()
    asked: list[int] = []
    with ScriptedService(answers) as service, WeightPublisher(tmp_path, "run", service.url) as publisher:
        for step in (1, 2, 3):
            before = answers.questions
            publication = publisher.publish(WEIGHTS, step=step, transport="delta")
            asked.append(answers.questions - before)
            assert publication.why_full is not None
    assert asked[1:] == [1, 1]
