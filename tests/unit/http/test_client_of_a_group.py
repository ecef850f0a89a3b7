"""A client that knows the services of a group finds the one that leads, and stays with it."""

from typing import Any

import pytest

from refitd_client import errors
from refitd_client.contract.wire import NewEngine, Notice, Problem
from refitd_client.http.connection import connect_to
from refitd_client.http.exchange import RetryPolicy
from support.quick_client import run
from support.scripted_service import ScriptedService
from support.sockets import free_port

STANDS_BY = Problem(type="urn:refitd:problem:not-leading", title="", status=503, detail="http://b leads")
REBUILDS = Problem(type="urn:refitd:problem:not-ready", title="", status=503, detail="wait")
ENGINES: dict[str, Any] = {"items": []}


def always(status: int, body: Any) -> ScriptedService:
    return ScriptedService(lambda _: (status, body))


def test_the_one_that_leads_is_found_at_once_and_asked_first_from_then_on() -> None:
    with always(503, STANDS_BY) as standby, always(200, ENGINES) as leader:
        both_urls = f"{standby.url}, {leader.url}"

        def use(client: Any) -> Any:
            return client.engines()

        patient = RetryPolicy(deadline=0.0)  # no pause is needed: each is asked once
        run(both_urls, use, retry=patient)
        assert (len(standby.requests), len(leader.requests)) == (1, 1)


def test_a_client_stays_with_the_one_that_answered() -> None:
    with always(503, STANDS_BY) as standby, always(200, ENGINES) as leader:
        run(f"{standby.url},{leader.url}", lambda client: [client.engines() for _ in range(3)])
        assert (len(standby.requests), len(leader.requests)) == (1, 3)


def test_one_that_is_gone_is_passed_over() -> None:
    with always(200, ENGINES) as leader:
        run(f"http://127.0.0.1:{free_port()},{leader.url}", lambda client: client.engines())
        assert len(leader.requests) == 1


def test_while_none_leads_all_are_asked_again_until_one_does() -> None:
    second = ScriptedService(lambda requests: (200, ENGINES) if len(requests) > 2 else (503, STANDS_BY))
    with always(503, STANDS_BY) as first, second:
        run(f"{first.url},{second.url}", lambda client: client.engines())
        assert len(first.requests) == len(second.requests) == 3


def test_a_leader_that_is_not_ready_is_waited_for_and_no_other_is_asked() -> None:
    leader = ScriptedService(lambda requests: (200, ENGINES) if len(requests) > 1 else (503, REBUILDS))
    with leader, always(503, STANDS_BY) as standby:
        run(f"{leader.url},{standby.url}", lambda client: client.engines())
        assert (len(leader.requests), len(standby.requests)) == (2, 0)


def test_what_may_have_been_carried_out_is_not_sent_to_another_unless_it_may_be_repeated() -> None:
    def hang_up(_: Any) -> Any:
        raise ConnectionAbortedError

    with ScriptedService(hang_up) as broken, always(503, STANDS_BY) as standby:
        urls = f"{broken.url},{standby.url}"
        with pytest.raises(errors.ServiceUnreachableError):
            run(urls, lambda client: client.add_engine(NewEngine(url="http://e:1")), retry=RetryPolicy(deadline=0.0))
        assert len(standby.requests) == 0
        with pytest.raises(errors.ServiceError):
            run(urls, lambda client: client.announce(Notice(run="r", step=1)), retry=RetryPolicy(deadline=0.0))
        assert len(standby.requests) == 1


def test_addresses_are_checked_one_by_one_and_named_once() -> None:
    found = connect_to("http://a:1, http://b:2/,http://a:1")
    assert (found.url, found.others) == ("http://a:1", ("http://b:2",))
    assert found.moved_on().service_url == "http://b:2,http://a:1"
    with pytest.raises(ValueError, match="names no HTTP service"):
        connect_to("http://a:1,b:2")
