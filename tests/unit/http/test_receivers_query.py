"""The question who can receive: a service that is down holds one step of a trainer, and not each of them."""

import pytest

from refitd_client.contract.plugin import Receivers
from refitd_client.contract.wire import Problem
from refitd_client.errors import ServiceError
from refitd_client.http.connection import Connection
from refitd_client.http.publisher_client import ReceiversQuery
from support.scripted_service import Answer, ScriptedService

THERE: Answer = (200, Receivers(receivers=[], others=["a"]))
BROKEN: Answer = (500, Problem(type="about:blank", title="broken", status=500, detail="broken"))
STARTS: Answer = (503, Problem(type="about:blank", title="starts", status=503, detail="starts"))


def test_after_a_question_without_an_answer_the_next_ones_are_asked_once_until_one_is_answered() -> None:
    script = [STARTS, THERE, BROKEN, STARTS, STARTS, THERE, STARTS, THERE]
    with ScriptedService(lambda requests: script[len(requests) - 1]) as service:
        query = ReceiversQuery(Connection(url=service.url), "run")
        assert query.ask().others == ["a"], "it is asked again while it starts"
        for _ in range(3):
            with pytest.raises(ServiceError):
                query.ask()
        assert len(service.requests) == 5, "one question each: a trainer waits for it"
        assert query.ask().others == ["a"]
        assert query.ask().others == ["a"], "it has answered, so it is asked again while it starts"
