"""Webhooks: told once, signed, written down before they are sent, tried again, and never without end."""

import asyncio
import base64
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from standardwebhooks.webhooks import Webhook  # the convention's own library, as a receiver uses it

from refitd.clock import SystemClock
from refitd.engine.port import Outcome, Refit
from refitd.observe.telemetry import Telemetry, Unserved
from refitd.observe.webhooks import delivery_task
from refitd.observe.webhooks.delivery_task import DeliveryTask, SignedPost, Webhooks, place_of
from refitd.observe.webhooks.news import News, Reporter
from refitd.observe.webhooks.rules import Topic, WebhookSecretError, read_secrets
from refitd.rollout.targets import Targets
from refitd.settings import Settings
from refitd.state.delivery import PAUSES, DeliveryRecord, Sent, after_try
from refitd.state.journal import reads
from refitd.state.journal.journal import Journal
from refitd.state.records import RolloutRecord
from refitd.state.store import Store
from refitd_client.contract.states import DeliveryState, EngineState, RolloutState, VersionState
from support.checkpoints import publish, tensors
from support.records import engine, version
from support.scripted_server import answer, hang_up, serve
from support.services import serving

SECRET = "whsec_" + base64.b64encode(b"k" * 32).decode()
URL = "http://127.0.0.1:9/hook"
NEWS = News(Topic.REJECTED, {"version": "run~v000001"})


def unserved_of(store: Store) -> Unserved:
    return Unserved(store.clock, store.runs.followed_since)


def secret_file(folder: Path, *secrets: str) -> Path:
    file = folder / "secret"
    file.write_text("\n".join(secrets or (SECRET,)))
    return file


class Receiver:
    """Takes what is posted, and answers by script; 200 when it is empty."""

    def __init__(self, *script: Sent) -> None:
        self.script = list(script)
        self.taken: list[DeliveryRecord] = []
        self.journal: Journal | None = None
        self.unwritten = 0

    async def __call__(self, delivery: DeliveryRecord) -> Sent:
        if self.journal is not None:
            waiting = await asyncio.to_thread(self.journal.read, reads.read_waiting_deliveries)
            self.unwritten += delivery.id not in {each.id for each in waiting}
        self.taken.append(delivery)
        return self.script.pop(0) if self.script else Sent(status=200)

    @property
    def said(self) -> list[dict[str, Any]]:
        return [json.loads(delivery.body) for delivery in self.taken]


@asynccontextmanager
async def courier(folder: Path, receiver: Receiver, *urls: str) -> AsyncIterator[tuple[DeliveryTask, Journal]]:
    journal = Journal(folder / "state")
    receiver.journal = journal
    made = DeliveryTask(journal, SystemClock(), urls or (URL,), receiver, ended=lambda _: None, chance=random.Random(1))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(made.run()), group.create_task(journal.run())]
        try:
            yield made, journal
        finally:
            tasks[0].cancel()
            await asyncio.wait(tasks[:1])
            await journal.durable()
            tasks[1].cancel()
    journal.close()


async def until(what: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not what():  # noqa: ASYNC110 - a delivery notifies nothing that a test could wait for
            await asyncio.sleep(0.002)


def written(journal: Journal) -> list[DeliveryRecord]:
    return [record for _, record in journal.read(lambda one: reads.read_deliveries(one, before=None, limit=5000))]


class TestSignature:
    async def test_a_receivers_own_library_believes_it_and_no_other(self, tmp_path: Path) -> None:
        record = delivery()
        with serve(answer(200)) as server:
            post = SignedPost(secret_file(tmp_path))
            assert (await post(replace(record, url=server.url))).status == 200
        (seen,) = server.seen
        assert Webhook(SECRET).verify(seen.body, seen.headers) == json.loads(record.body)
        assert seen.headers["webhook-id"] == record.id
        with pytest.raises(Exception, match="No matching signature"):
            Webhook("whsec_" + base64.b64encode(b"x" * 32).decode()).verify(seen.body, seen.headers)
        with pytest.raises(Exception, match="No matching signature"):
            Webhook(SECRET).verify(seen.body.replace(b"000001", b"000002"), seen.headers)

    async def test_while_secrets_are_exchanged_receivers_with_either_believe_it(self, tmp_path: Path) -> None:
        other = "whsec_" + base64.b64encode(b"x" * 32).decode()
        with serve(answer(200)) as server:
            await SignedPost(secret_file(tmp_path, SECRET, other))(replace(delivery(), url=server.url))
        for secret in (SECRET, other):
            Webhook(secret).verify(server.seen[0].body, server.seen[0].headers)

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("", "holds 0 secrets"),
            ("hush", "does not begin with whsec_"),
            ("whsec_!!!", "not base64"),
            ("whsec_" + base64.b64encode(b"short").decode(), "of 5 bytes"),
            ("\n".join([SECRET] * 5), "holds 5 secrets"),
        ],
    )
    def test_what_is_no_secret_is_refused_by_name_and_not_shown(self, text: str, why: str, tmp_path: Path) -> None:
        with pytest.raises(WebhookSecretError, match=why) as refused:
            read_secrets(secret_file(tmp_path, text))
        assert not text or text not in str(refused.value)

    async def test_without_a_secret_nothing_is_sent(self, tmp_path: Path) -> None:
        with serve(answer(200)) as server:
            sent = await SignedPost(tmp_path / "none")(replace(delivery(), url=server.url))
        assert "cannot be signed" in (sent.trouble or "")
        assert not server.seen


def delivery(**fields: Any) -> DeliveryRecord:
    body = NEWS.body("2026-01-01T00:00:00Z")
    defaults = {"id": "msg_1", "topic": "rejected", "url": URL, "body": body, "created_at": "2026-01-01T00:00:00Z"}
    return DeliveryRecord(**(defaults | fields))


class TestTries:
    def test_it_is_tried_again_later_and_later_and_then_given_up(self) -> None:
        record, pauses = delivery(), []
        while True:
            record, pause = after_try(record, Sent(status=503), "now")
            if pause is None:
                break
            pauses.append(pause)
        assert pauses == [*PAUSES]
        assert (record.state, record.tries) == (DeliveryState.GIVEN_UP, len(PAUSES) + 1)
        assert record.reason == "it answered 503, after 7 tries"

    @pytest.mark.parametrize(
        ("sent", "state"),
        [
            (Sent(status=204), DeliveryState.DELIVERED),
            (Sent(status=410), DeliveryState.GIVEN_UP),
            (Sent(status=302), DeliveryState.WAITING),
            (Sent(status=400), DeliveryState.WAITING),
            (Sent(trouble="it cannot be reached"), DeliveryState.WAITING),
        ],
    )
    def test_only_2xx_is_taken_and_only_410_wants_no_more(self, sent: Sent, state: DeliveryState) -> None:
        assert after_try(delivery(), sent, "now")[0].state is state

    def test_a_receiver_may_ask_for_a_longer_pause_but_not_for_ever(self) -> None:
        assert after_try(delivery(), Sent(status=429, retry_after=60), "now")[1] == 60
        assert after_try(delivery(), Sent(status=429, retry_after=1), "now")[1] == PAUSES[0]
        assert after_try(delivery(), Sent(status=429, retry_after=1e9), "now")[1] == 18000

    async def test_a_redirect_is_not_followed_and_a_dead_receiver_is_trouble(self, tmp_path: Path) -> None:
        post = SignedPost(secret_file(tmp_path))
        with serve(answer(302, Location="http://127.0.0.1:9/")) as server:
            assert (await post(replace(delivery(), url=server.url))).status == 302
        with serve(hang_up) as server:
            assert "cannot be reached" in ((await post(replace(delivery(), url=server.url))).trouble or "")
        assert "cannot be reached" in ((await post(delivery())).trouble or "")


class TestCourier:
    async def test_it_is_written_down_before_it_is_sent_and_told_to_every_url(self, tmp_path: Path) -> None:
        receiver = Receiver()
        async with courier(tmp_path, receiver, URL, "http://127.0.0.1:9/other") as (made, journal):
            made.tell(NEWS)
            await until(lambda: made.waiting == 0)
            await journal.durable()
            assert {each.state for each in written(journal)} == {DeliveryState.DELIVERED}
        assert len(receiver.taken) == 2
        assert receiver.unwritten == 0
        assert len({each.id for each in receiver.taken}) == 2

    async def test_a_service_that_was_stopped_goes_on_with_what_waited(self, tmp_path: Path) -> None:
        """With the same id, so that the receiver can tell a repetition, and with the tries that were made."""
        down = Receiver(Sent(status=500))
        async with courier(tmp_path, down) as (made, _):
            made.tell(NEWS)
            await until(lambda: len(down.taken) == 1)
        up = Receiver()
        async with courier(tmp_path, up) as (made, journal):
            await until(lambda: made.waiting == 0)
            await journal.durable()
            (record,) = written(journal)
        assert (record.state, record.tries, record.id) == (DeliveryState.DELIVERED, 2, down.taken[0].id)

    async def test_what_waits_for_a_url_that_was_taken_out_is_given_up(self, tmp_path: Path) -> None:
        async with courier(tmp_path, Receiver(Sent(status=500))) as (made, _):
            made.tell(NEWS)
            await until(lambda: made.waiting == 1)
        other = Receiver()
        async with courier(tmp_path, other, "http://127.0.0.1:9/other") as (_, journal):
            await journal.durable()
            (record,) = written(journal)
        assert record.state is DeliveryState.GIVEN_UP
        assert "no longer among" in (record.reason or "")
        assert not other.taken

    async def test_it_is_capped_what_waits_and_what_is_remembered(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("refitd.state.delivery.MAX_WAITING", 5)
        monkeypatch.setattr(delivery_task, "KEPT", 3)
        async with courier(tmp_path, Receiver(*[Sent(status=500)] * 100)) as (made, journal):
            for _ in range(20):
                made.tell(NEWS)
            assert made.waiting == 5
            await journal.durable()
            found = written(journal)
        over = [each for each in found if each.state is DeliveryState.GIVEN_UP]
        assert len(over) == 3
        assert "waiting already" in (over[0].reason or "")

    def test_a_url_is_shown_without_what_could_be_a_secret(self) -> None:
        assert place_of("https://hooks.example.com:8443/services/T0/B0/xyz?key=1") == "https://hooks.example.com:8443/…"


class TestNews:
    async def test_what_is_served_and_rejected_is_told_once_each(self, tmp_path: Path) -> None:
        receiver = Receiver()
        async with serving(tmp_path) as stage:
            settings = Settings(
                root=stage.root, webhooks=[URL], webhook_secret_file=secret_file(tmp_path), webhook_events=[*Topic]
            )
            hooks = Webhooks(settings.webhook_rules, stage.store, stage.targets, Telemetry(stage.store), receiver)
            sending = asyncio.create_task(hooks.run())
            await stage.served(1)
            weights = tensors(2)
            del weights["layer.1.weight"]
            publish(stage.root, "run", 2, weights)
            await stage.rejected("run~v000002")
            stage.store.put_version(replace(stage.store.versions["run~v000001"], pinned=True), "pinned")
            await until(lambda: hooks.deliveries.waiting == 0)
            shown = (await stage.http.get("/v1/deliveries")).json()["items"]
            sending.cancel()
            await asyncio.wait([sending])
        assert [said["type"] for said in receiver.said] == ["version.served", "version.rejected"]
        assert receiver.said[0]["data"]["version"] == "run~v000001"
        assert receiver.said[1]["data"]["code"] == "missing-tensor"
        assert "layer.1.weight" in receiver.said[1]["data"]["reason"]
        assert [(each["topic"], each["state"]) for each in shown] == [
            ("rejected", "DELIVERED"), ("served", "DELIVERED")
        ]  # fmt: skip
        assert shown[0]["to"] == "http://127.0.0.1:9/…"
        assert [each["about"] for each in shown] == ["run~v000002", "run~v000001"]

    async def test_topics_that_nobody_wants_are_not_told(self, tmp_path: Path) -> None:
        async with serving(tmp_path) as stage:
            told: list[News] = []
            unserved = unserved_of(stage.store)
            reporter = Reporter(
                stage.store, stage.targets, unserved, told.append, topics=[Topic.REJECTED], stalled_after=60
            )
            stage.store.observe(reporter)
            await stage.served(1)
        assert not told

    def test_a_version_that_is_rejected_again_for_the_same_reason_is_told_once(self, tmp_path: Path) -> None:
        """A notice that comes late has it looked at again: it may allow what was missing."""
        store = Store(Journal(tmp_path), SystemClock())
        told: list[News] = []
        store.observe(
            Reporter(
                store,
                Targets(store),
                unserved_of(store),
                told.append,
                topics=[*Topic],
                stalled_after=60,
            )
        )
        for reason in ("torn", "torn", "a tensor is missing"):
            store.put_version(version(1, state=VersionState.ANNOUNCED))
            store.put_version(version(1, state=VersionState.REJECTED, reason=reason))
        assert [news.data["reason"] for news in told] == ["torn", "a tensor is missing"]

    def test_a_rollout_is_degraded_once_however_often_its_engine_goes_away(self, tmp_path: Path) -> None:
        store = Store(Journal(tmp_path), SystemClock())
        store.put_version(version(1))
        store.put_engine(engine("a", serving=version(1).id))
        store.put_engine(engine("b", state=EngineState.UNREACHABLE, reason="refused"))
        told: list[News] = []
        store.observe(
            Reporter(
                store,
                Targets(store),
                unserved_of(store),
                told.append,
                topics=[Topic.DEGRADED],
                stalled_after=60,
            )
        )
        rollout = RolloutRecord(number=1, run="run", version=version(1).id, cause="", started_at="")
        for state in (RolloutState.ROLLING, RolloutState.DEGRADED, RolloutState.COMPLETE, RolloutState.DEGRADED):
            store.put_rollout(replace(rollout, state=state), "")
        (news,) = told
        assert news.data["late_engines"] == [{"id": "b", "state": "UNREACHABLE", "reason": "refused"}]
        again: list[News] = []
        Reporter(
            store, Targets(store), unserved_of(store), again.append, topics=[*Topic], stalled_after=60
        ).rollout_changed(replace(rollout, state=RolloutState.DEGRADED))
        assert not again, "a restart tells nothing twice"

    def test_a_run_that_stalls_is_told_once_until_it_has_moved(self, tmp_path: Path) -> None:
        store = Store(Journal(tmp_path), SystemClock())
        store.put_version(version(7))
        store.put_engine(engine("a", state=EngineState.NACKED, reason="no room"))
        clock = Hands()
        unserved = Unserved(clock, {"run": 0})
        told: list[News] = []
        reporter = Reporter(store, Targets(store), unserved, told.append, topics=[Topic.STALLED], stalled_after=60)
        rollout = RolloutRecord(number=1, run="run", version=version(7).id, cause="", started_at="")
        for _ in range(2):
            unserved.rollout_changed(rollout)
            for passed in (59, 2, 239):
                clock.time += passed
                reporter.look()
            unserved.rollout_changed(replace(rollout, state=RolloutState.COMPLETE))
            reporter.look()
        assert [news.data["seconds"] for news in told] == [61, 61]
        assert told[0].data["step"] == 7
        assert told[0].data["late_engines"][0]["reason"] == "no room"


class Hands:
    """A clock that is set by hand."""

    time = 0.0

    def monotonic(self) -> float:
        return self.time

    def now(self) -> str:
        return ""


class TestSettings:
    @pytest.mark.parametrize(
        ("given", "why"),
        [
            ({"webhooks": [URL]}, "needs --webhook-secret-file"),
            ({"webhooks": ["ftp://x/"], "webhook_secret_file": "SECRET"}, "http:// or https://"),
            ({"webhooks": ["https://me:hush@x/"], "webhook_secret_file": "SECRET"}, "without user"),
            ({"webhooks": [URL, URL], "webhook_secret_file": "SECRET"}, "twice"),
            ({"webhooks": [URL], "webhook_secret_file": "/nowhere"}, "/nowhere cannot be read"),
            ({"webhooks": [URL], "webhook_secret_file": "SECRET", "webhook_events": ["severd"]}, "webhook_events"),
            ({"webhooks": [URL], "webhook_secret_file": "SECRET", "webhook_events": []}, "nothing would be told"),
            ({"webhook_events": ["served"]}, "is for --webhook"),
            ({"webhooks_file": "/nowhere", "webhook_secret_file": "SECRET"}, "/nowhere cannot be read"),
            ({"webhook_secret_file": "SECRET"}, "is for --webhook"),
        ],
    )
    def test_bad_settings_are_refused_at_the_start(self, given: dict[str, Any], why: str, tmp_path: Path) -> None:
        if given.get("webhook_secret_file") == "SECRET":
            given = given | {"webhook_secret_file": secret_file(tmp_path)}
        with pytest.raises(ValidationError, match=why) as refused:
            Settings(root=tmp_path, **given)
        assert "hush" not in str(refused.value)

    @pytest.mark.parametrize(
        ("text", "why"), [("", "names no URL"), ("ftp://x/", "http:// or https://"), (f"{URL}\n{URL}\n", "twice")]
    )
    def test_a_file_of_urls_that_cannot_be_used_is_refused(self, text: str, why: str, tmp_path: Path) -> None:
        (tmp_path / "urls").write_text(text)
        with pytest.raises(ValidationError, match=why):
            Settings(root=tmp_path, webhooks_file=tmp_path / "urls", webhook_secret_file=secret_file(tmp_path))

    def test_urls_come_from_a_file_that_no_list_of_processes_shows(self, tmp_path: Path) -> None:
        (tmp_path / "urls").write_text(f"# the pager\n{URL}\n")
        settings = Settings(root=tmp_path, webhooks_file=tmp_path / "urls", webhook_secret_file=secret_file(tmp_path))
        assert settings.receivers == [URL]


async def test_a_load_that_fails_at_first_is_no_news(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        told: list[News] = []
        unserved = unserved_of(stage.store)
        stage.store.observe(
            Reporter(stage.store, stage.targets, unserved, told.append, topics=[*Topic], stalled_after=60)
        )
        stage.engines["a"].script.append(Refit(outcome=Outcome.NACK, resumed=True, reason="no room"))
        await stage.served(1)
    assert [news.topic for news in told] == [Topic.SERVED]
