"""Notices in numbers, and through a network that cuts and repeats: each version is one, and the newest wins."""

import asyncio
import json
import re
import threading
from pathlib import Path

from faults.stand import Subject, id_of, standing, until
from refitd_client import Notice, PublishOptions, RefitClient, WeightPublisher
from refitd_client.contract.states import EngineState, WaitOutcome
from refitd_client.errors import ServiceUnreachableError
from support.jobs import RUN, TOKEN
from support.proxy import Fault, Proxy

LOAD = "/update_weights_from_disk"
NOTICES = "/v1/versions"
THOUSAND = 1000
EACH = 10  # one after the other, on each of a hundred connections: fewer than one peer has places
FLOOD = 60
GROWTH = 64 * 2**20  # bytes


async def send(port: int, body: dict[str, object], times: int) -> list[tuple[int, dict[str, object]]]:
    """Send the same notice on so many connections at a time, `EACH` times on each; the statuses and documents."""
    data = json.dumps(body).encode()
    head = f"POST {NOTICES} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data

    async def one() -> list[tuple[int, dict[str, object]]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        answers: list[tuple[int, dict[str, object]]] = []
        for _ in range(EACH):
            writer.write(request)
            answer = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", answer)
            assert length is not None
            answers.append((int(answer.split()[1]), json.loads(await reader.readexactly(int(length[1])))))
        writer.close()
        return answers

    return [answer for answers in await asyncio.gather(*(one() for _ in range(times // EACH))) for answer in answers]


async def test_one_notice_a_thousand_times_at_once_is_one_version_served_once(engine: Subject, tmp_path: Path) -> None:
    with Proxy(engine.server.port) as proxy, standing(tmp_path, engine, engines=[proxy.url]) as stand:
        with WeightPublisher(stand.root, RUN) as publisher:
            publisher.publish(engine.model(1), step=1)
        replies = await send(stand.refitd.port, {"run": RUN, "step": 1}, THOUSAND)
        assert len(replies) == THOUSAND
        assert {status for status, _ in replies} <= {200, 202}
        assert {document["id"] for _, document in replies} == {id_of(1)}
        await asyncio.to_thread(stand.is_served, 1)
        assert engine.serves(1)
        assert len(stand.client.versions().items) == 1
        assert proxy.count(LOAD) == 1


def test_a_flood_of_notices_with_slow_engines_is_bounded_and_the_newest_wins(engine: Subject, tmp_path: Path) -> None:
    """What nobody waits for any more is neither loaded nor kept: not on the disk, not in memory, not in a queue."""
    with (
        Proxy(engine.server.port) as proxy,
        standing(tmp_path, engine, "--keep-last", "2", engines=[proxy.url]) as stand,
    ):
        stand.serve(engine.model(1), 1)
        before = stand.process.memory_info().rss
        proxy.slow(LOAD, 0.5)
        with WeightPublisher(stand.root, RUN, stand.refitd.url, options=PublishOptions(token=TOKEN)) as publisher:
            flood = [publisher.publish(engine.model(step), step=step) for step in range(2, FLOOD + 1)]
        flood[-1].wait(timeout=60)
        assert engine.serves(FLOOD)
        loads = proxy.count(LOAD)
        assert loads < FLOOD * 2 // 3, f"{loads} loads for {FLOOD} versions: old ones were not passed over"
        assert stand.client.wait(id_of(FLOOD // 2)).outcome in {WaitOutcome.SUPERSEDED, WaitOutcome.SERVED}
        # The newest two, and what engines served before: a rollback goes to it.
        until(lambda: len(stand.folders()) <= 3, "what nobody needs was not collected")
        assert stand.process.memory_info().rss - before < GROWTH


def test_a_notice_is_the_same_however_often_its_reply_is_cut_or_comes_twice(engine: Subject, tmp_path: Path) -> None:
    with standing(tmp_path, engine) as stand, Proxy(stand.refitd.port) as proxy:
        faults = [Fault.CUT_REQUEST, Fault.HALF_REQUEST, Fault.LOST_REPLY, Fault.HALF_REPLY, Fault.TWICE]
        with RefitClient(proxy.url, token=TOKEN) as client:
            for step, fault in enumerate(faults, start=1):
                with WeightPublisher(stand.root, RUN) as publisher:
                    publisher.publish(engine.model(step), step=step)
                proxy.plan(NOTICES, fault)
                assert client.announce(Notice(run=RUN, step=step)).step == step
                proxy.plan(f"{NOTICES}/{id_of(step)}/wait", fault, fault)
                result = client.wait(id_of(step), timeout=60)
                assert (result.version.step, result.outcome) == (step, WaitOutcome.SERVED)
                assert engine.serves(step)
            assert [version.step for version in client.versions().items] == [5, 4, 3, 2, 1]


def test_answers_that_come_twice_are_never_taken_for_those_of_the_next_question(
    engine: Subject, tmp_path: Path
) -> None:
    """Else a trainer would be told of a version that an engine serves, when it serves another."""
    with standing(tmp_path, engine) as stand, Proxy(stand.refitd.port) as proxy:
        stand.serve(engine.model(1), 1)
        stand.serve(engine.model(2), 2)
        with RefitClient(proxy.url, token=TOKEN) as client:
            proxy.plan(f"{NOTICES}/{id_of(1)}", *[Fault.TWICE] * 5)
            for _ in range(5):
                assert (client.version(id_of(1)).step, client.version(id_of(2)).step) == (1, 2)


def test_a_rollback_whose_reply_is_lost_is_done_once(engine: Subject, tmp_path: Path) -> None:
    with standing(tmp_path, engine) as stand, Proxy(stand.refitd.port) as proxy:
        for step in (1, 2, 3):
            stand.serve(engine.model(step), step)
        proxy.plan("/v1/rollback", Fault.LOST_REPLY)
        try:
            with RefitClient(proxy.url, token=TOKEN) as client:
                client.rollback(RUN)
        except ServiceUnreachableError:
            pass
        else:
            raise AssertionError("the client said what it cannot know")
        until(lambda: stand.engine_now.step == 2 and stand.engine_now.state is EngineState.IN_SYNC)
        assert engine.serves(2)
        assert proxy.count("/v1/rollback") == 1


def test_a_wait_and_the_event_stream_survive_a_network_that_goes_away(engine: Subject, tmp_path: Path) -> None:
    with standing(tmp_path, engine) as stand, Proxy(stand.refitd.port) as proxy:
        with WeightPublisher(stand.root, RUN, proxy.url, options=PublishOptions(token=TOKEN)) as publisher:
            publication = publisher.publish(engine.model(1), step=1)
            publication.wait(timeout=60)
        seen: list[int] = []
        three = threading.Event()

        def listen() -> None:
            with RefitClient(proxy.url, token=TOKEN) as client:
                for event in client.events("0"):
                    seen.append(event.seq)
                    if event.subject == id_of(3) and event.text.startswith("served"):
                        three.set()
                        return

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        proxy.until("/v1/events", 1)
        proxy.down()
        waiting = threading.Thread(target=publication.wait, daemon=True)
        waiting.start()
        stand.serve(engine.model(2), 2)
        proxy.up()
        waiting.join(60)
        assert not waiting.is_alive()
        stand.serve(engine.model(3), 3)
        assert three.wait(60)
        assert seen == list(range(1, len(seen) + 1)), "events are missing, or came twice"
