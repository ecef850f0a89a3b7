"""What a host's report may do at its hub: it says what that host is at, and nothing else."""

import asyncio
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from refitd.api.auth import FollowClaim
from refitd.state.records import Source
from refitd.tokens import TokensRefusedError, digest_of, names_of, tokens_from
from refitd_client.contract.states import EngineState
from refitd_hosts.hub.hub import HostNames
from refitd_hosts.hub.reported import GONE_SECONDS
from refitd_hosts.policy.hosts import ANEW
from support.records import version
from support.services import Stage, serving

ENGINES = {"follower": "one", "states": {"IN_SYNC": 1}, "engines": []}


def report(name: str = "one", number: int = 1, told: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    said = {"follower": name, "upstream": "http://hub", "upstreams": [], "process": "p", "run": "run"}
    return {"told": said | {"host": ENGINES} | (told or {}), "number": number} | fields


async def test_a_host_that_reports_is_an_engine_that_nobody_calls(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        answer = await stage.http.put("/v1/hosts/one", json=report())
        assert answer.json() | {"leader": "", "told_by": ""} == {
            "lease_seconds": 30.0,
            "serve": {},
            "again": 0,
            "leader": "",
            "epoch": 0,
            "told_by": "",
            "knows": {},
            "digests": {},
            "trial": None,
            "pull": None,
            "soon": True,
            "busy_seconds": 1.0,
        }
        record = stage.store.engines["one"]
        assert (record.url, record.naming.source) == ("host:one", Source.REPORTED)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("other", report()),
        ("a b", report("a b")),
        ("one", report(url="http://127.0.0.1:9")),
        ("one", report(told={"url": "http://127.0.0.1:9"})),
        ("one", report(wrong={"p": "a lie"})),
        ("one", report(told={"order_reason": "x" * 501})),
        ("one", report(holds=["v"] * 1001)),
        ("one", report(told={"host": ENGINES | {"engines": [{"id": "e", "state": "IN_SYNC"}] * 17}})),
    ],
)
async def test_a_report_that_says_more_than_it_may_is_refused(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    async with serving(tmp_path) as stage:
        answer = await stage.http.put(f"/v1/hosts/{path}", json=body)
        assert answer.status_code == 422, answer.text
        assert "one" not in stage.store.engines


async def test_a_host_cannot_take_the_name_of_an_engine_or_of_a_host_that_has_reported_since(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        (engine,) = stage.store.engines
        taken = await stage.http.put(f"/v1/hosts/{engine}", json=report(engine))
        assert (taken.status_code, taken.json()["type"]) == (409, "urn:refitd:problem:host-name-taken")
        for process in ("first", "second"):
            assert (await stage.http.put("/v1/hosts/one", json=report(told={"process": process}))).status_code == 200
        late = await stage.http.put("/v1/hosts/one", json=report(number=9, told={"process": "first"}))
        assert late.status_code == 409
        assert "another host has reported as one since" in late.json()["detail"]


async def test_a_rollback_lets_a_host_go_back_also_from_what_is_older_than_something_that_the_hub_knows(
    tmp_path: Path,
) -> None:
    """The hub was restored from a backup, and has published and barred newer steps since. It never knew step 5."""
    async with serving(tmp_path) as stage:
        for step in (1, 8, 9):
            stage.store.put_version(version(step, digest="d", served_at="t"))
        told = {"serves": "run~v000005", "ordered": "run~v000005", "digests": {"run~v000005": "d"}}

        async def known() -> str | None:
            answer = await stage.http.put("/v1/hosts/one", json=report(told=told))
            return answer.json()["knows"].get("run")

        assert await known() is None, "the host goes back from nothing that the hub does not know"
        forward = await stage.http.get("/v1/rollback", params={"run": "run", "to": "run~v000008"})
        assert forward.json()["unknown"] == [], "step 8 is newer than what the host has: it leaves nothing for that"
        order = {"run": "run", "to": "run~v000001"}
        asked = await stage.http.get("/v1/rollback", params=order)
        assert asked.json()["unknown"] == ["run~v000005"]
        assert (await stage.http.post("/v1/rollback", json=order)).status_code == 200
        assert await known() == "run~v000005"


async def test_a_hub_says_of_what_is_announced_past_the_sdk_that_hosts_have_something_newer_that_it_does_not_know(
    tmp_path: Path,
) -> None:
    """Its root was emptied, and a script announces step 9 again, by a name of the first generation."""
    async with serving(tmp_path, scan_interval=3600.0) as stage:  # else a scan may find the folder before the notice
        told = {"serves": "run~v000003.g7", "ordered": "run~v000003.g7"}
        assert (await stage.http.put("/v1/hosts/one", json=report(told=told))).status_code == 200
        for step, path in ((9, "run/v000009"), (4, "run/v000004.g7")):
            (stage.root / path).mkdir(parents=True)
            notice = {"run": "run", "step": step, "path": path}
            assert (await stage.http.post("/v1/versions", json=notice)).is_success
        log = (await stage.http.get("/v1/log", params={"severity": "warning"})).json()["items"]
        said = [entry["text"] for entry in log if entry["subject"] == "run~v000009"]
        why = "is older than run~v000003.g7, which hosts have and this service does not know: they stay there."
        assert said == [f"{why} {ANEW}"]
        assert not any("hosts have" in entry["text"] for entry in log if entry["subject"] != "run~v000009")


class Clock:
    """Stands still unless a test moves it."""

    seconds = 0.0

    def now(self) -> str:
        return ""

    def monotonic(self) -> float:
        return self.seconds


def test_a_token_speaks_for_the_names_in_its_line_alone() -> None:
    lines = ("node-1:secret", "gpu-*:several", "bare")
    claim = FollowClaim(digest_of("secret"), names_of("secret", lines))
    many = FollowClaim(digest_of("several"), names_of("several", lines))
    names = HostNames(Clock())
    assert names.refusal(claim, "node-1") is None
    assert names.refusal(claim, "node-2") == "the token speaks for node-1, and not for node-2"
    assert names.refusal(many, "gpu-7") is names.refusal(many, "gpu-8") is None
    assert names.refusal(many, "cpu-1") is not None
    assert names_of("bare", lines) is None


def test_a_token_without_a_name_speaks_for_the_host_that_used_it_first_until_that_is_gone() -> None:
    clock = Clock()
    names, claim = HostNames(clock), FollowClaim(digest_of("bare"), None)
    assert names.refusal(claim, "one") is None
    why = names.refusal(claim, "other")
    assert why is not None
    assert "the token speaks for one, which used it first, and not for other" in why
    clock.seconds += GONE_SECONDS - 1
    assert names.refusal(claim, "one") is None
    clock.seconds += GONE_SECONDS - 1
    assert names.refusal(claim, "other") is not None
    clock.seconds += 2
    assert names.refusal(claim, "other") is None


def test_a_file_of_tokens_that_follow_has_a_line_for_each_of_a_thousand_hosts(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("".join(f"node-{number}:token-{number}\n" for number in range(1000)))
    lines = tokens_from("followers_token", None, file, 4096)
    assert names_of("token-999", lines) == "node-999"
    with pytest.raises(TokensRefusedError):
        tokens_from("token", None, file)


async def test_a_follow_token_reports_for_its_own_host_alone(tmp_path: Path) -> None:
    for name, text in (("write", "W" * 20), ("follow", "one:" + "F" * 20)):
        (tmp_path / name).write_text(text)
    files: dict[str, Any] = {"token_file": tmp_path / "write", "followers_token_file": tmp_path / "follow"}
    async with serving(tmp_path / "service", **files) as stage:
        mine = {"Authorization": f"Bearer {'F' * 20}"}
        assert (await stage.http.put("/v1/hosts/one", json=report(), headers=mine)).status_code == 200
        other = await stage.http.put("/v1/hosts/other", json=report("other"), headers=mine)
        assert (other.status_code, other.json()["detail"]) == (403, "the token speaks for one, and not for other")
        writes = {"Authorization": f"Bearer {'W' * 20}"}
        assert (await stage.http.put("/v1/hosts/other", json=report("other"), headers=writes)).status_code == 200


async def test_a_reply_says_what_this_service_knows_and_a_rollback_lets_each_host_leave_what_that_host_had(
    tmp_path: Path,
) -> None:
    """What one of them says of itself is said to no other: it may lie."""
    lies = {"desired": "run~v000999", "fence": 10**9}
    async with serving(tmp_path) as stage:
        version = await stage.served(1)
        for name, number in (("liar", 1), ("free", 1), ("liar", 2), ("free", 2)):
            told = lies if name == "liar" else {}
            sent = report(name, number, told, freely=name == "free")
            reply = (await stage.http.put(f"/v1/hosts/{name}", json=sent)).json()
            assert reply["knows"] == {"run": version}
        plan = (await stage.http.get("/v1/rollback", params={"run": "run", "to": version})).json()
        assert plan["unknown"] == ["run~v000999"]
        assert (await stage.http.post("/v1/rollback", json={"run": "run", "to": version})).status_code == 200
        reply = (await stage.http.put("/v1/hosts/liar", json=report("liar", 3, lies))).json()
        assert (reply["knows"], reply["epoch"]) == ({"run": "run~v000999"}, 10**9)
        reply = (await stage.http.put("/v1/hosts/honest", json=report("honest"))).json()
        assert (reply["knows"], reply["epoch"]) == ({"run": version}, 0)


@pytest.mark.parametrize("named", ["ordered", "engine"])
async def test_a_newer_version_at_the_hub_says_nothing_of_what_a_host_has_also_while_its_engines_are_restarted(
    tmp_path: Path, named: str
) -> None:
    """The hub was restored from a backup, and something was published since: it does not know step 2 of before."""
    async with serving(tmp_path) as stage:
        await stage.served(1)
        await stage.served(3)
        old = {"ordered": "run~v000002"}
        if named == "engine":
            engines = [{"id": "e", "state": "IN_SYNC", "version": "run~v000002"}]
            old = {"host": ENGINES | {"engines": engines}}
        reply = (await stage.http.put("/v1/hosts/one", json=report(told=old))).json()
        assert reply["knows"] == {}
        known = report(number=2, told={"ordered": "run~v000001"})
        assert (await stage.http.put("/v1/hosts/one", json=known)).json()["knows"] == {"run": "run~v000003"}


async def test_a_publisher_hears_which_names_hosts_have_and_one_that_lies_costs_a_generation_at_most(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as stage:
        version, numbers = await stage.served(1), count(1)

        async def on_hosts(*holds: str) -> str | None:
            sent = report(number=next(numbers), told={"serves": version}, holds=holds)
            assert (await stage.http.put("/v1/hosts/one", json=sent)).status_code == 200
            return (await stage.http.get("/v1/versions", params={"run": "run"})).json()["on_hosts"]

        assert await on_hosts(version) is None
        assert await on_hosts("other~v000009", "no version") is None
        assert await on_hosts("run~v000004", "run~v000009", version) == "run~v000009"
        assert await on_hosts("run~v000009", f"run~v000001.g{10**12}") == "run~v000009"


async def test_a_host_whose_contents_are_others_of_the_same_name_counts_as_one_that_serves_nothing(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as stage:
        version = await stage.served(1)
        has = dict.fromkeys(("desired", "ordered", "serves"), version)
        host = {"order": "served", "proof": "host:c:1"} | has
        for number, digest, serves in ((1, stage.store.versions[version].digest, version), (2, "xxh3:other", None)):
            told = host | {"digests": {version: digest}}
            answer = await stage.http.put("/v1/hosts/one", json=report("one", number, told))
            assert answer.status_code == 200, answer.text
            async with asyncio.timeout(10):
                while stage.store.engines["one"].serving != serves:
                    await stage.store.changed.wait_after(stage.store.changed.count, within=0.05)


async def warnings(stage: Stage) -> list[str]:
    log = (await stage.http.get("/v1/log", params={"severity": "warning"})).json()["items"]
    return [entry["text"] for entry in log if entry["kind"] == "follower"]


async def test_two_hosts_that_report_by_one_name_are_said_in_status_explain_and_once_in_the_log(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        for number in range(1, 6):
            for process in ("first", "second"):
                if number == 1 or process == "second":
                    sent = report(number=number, told={"process": process, "order": "served"})
                    assert (await stage.http.put("/v1/hosts/one", json=sent)).status_code == 200
                else:
                    sent = report(number=number, told={"process": process})
                    assert (await stage.http.put("/v1/hosts/one", json=sent)).status_code == 409
        why = "two hosts report as one: give each a name of its own (--follower)"
        async with asyncio.timeout(10):
            while why not in (await stage.http.get("/v1/engines")).text:
                await stage.store.changed.wait_after(stage.store.changed.count, within=0.05)
        told = (await stage.http.get("/v1/explain/one")).json()["sentences"]
        assert f"T{why[1:]}." in told
        assert len(await warnings(stage)) == 1


async def test_a_report_that_is_refused_for_its_token_is_said_once_in_the_log_of_the_hub(tmp_path: Path) -> None:
    for name, text in (("write", "W" * 20), ("follow", "one:" + "F" * 20)):
        (tmp_path / name).write_text(text)
    files: dict[str, Any] = {"token_file": tmp_path / "write", "followers_token_file": tmp_path / "follow"}
    async with serving(tmp_path / "service", **files) as stage:
        for token, status in (("wrong", 401), ("F" * 20, 403)):
            for _ in range(3):
                headers = {"Authorization": f"Bearer {token}"}
                answer = await stage.http.put("/v1/hosts/other", json=report("other"), headers=headers)
                assert answer.status_code == status
        assert sorted(await warnings(stage)) == [
            "a report in its name was refused: the token speaks for one, and not for other",
            "a report in its name was refused: this changes something and needs the bearer token: the one that was "
            "sent is not known here",
        ]


async def test_a_host_is_removed_once_it_reports_no_more_and_comes_back_with_its_next_report(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        assert (await stage.http.put("/v1/hosts/one", json=report())).status_code == 200
        refused = await stage.http.delete("/v1/engines/one")
        assert refused.status_code == 409
        assert "stop the refitd there" in refused.json()["detail"]
        assert "remove it here when it is UNREACHABLE" in refused.json()["detail"]
        record = stage.store.engines["one"]
        stage.store.put_engine(replace(record, state=EngineState.UNREACHABLE))
        assert (await stage.http.delete("/v1/engines/one")).status_code == 204
        assert "one" not in stage.store.engines
        assert (await stage.http.put("/v1/hosts/one", json=report(number=2))).status_code == 200
        assert "one" in stage.store.engines


async def test_explain_of_an_engine_of_a_host_names_the_host(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        engines = [{"id": "127.0.0.1:31000", "state": "IN_SYNC"}]
        told = {"host": ENGINES | {"engines": engines}, "order": "served"}
        await stage.served(1)
        assert (await stage.http.put("/v1/hosts/one", json=report(told=told))).status_code == 200
        async with asyncio.timeout(10):
            while stage.store.engines["one"].seen.host is None:
                await stage.store.changed.wait_after(stage.store.changed.count, within=0.05)
        for name in ("127.0.0.1:31000", "http://127.0.0.1:31000"):
            answer = await stage.http.get(f"/v1/explain/{name}")
            assert answer.status_code == 404
            assert answer.json()["detail"] == f"engine {name} belongs to host one: ask that host"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("host-1:a\n\nhost-4:\n", r"line 3 \(host-4:\) has no token: write name:token"),
        ("host-1:a\nhost-2:b\nhost-3:a\n", "lines 1 and 3 have the same token: give each its own"),
        ("a\nhost-1:a\n", "lines 1 and 2 have the same token"),
    ],
)
def test_a_line_without_a_token_and_a_token_on_two_lines_are_refused_by_their_numbers(
    tmp_path: Path, text: str, why: str
) -> None:
    file = tmp_path / "tokens"
    file.write_text(text)
    with pytest.raises(TokensRefusedError, match=why):
        tokens_from("followers_token", None, file, 4096)
