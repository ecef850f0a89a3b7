"""Hubs that are restored from a backup, emptied, or two: their hosts go back to nothing and say why they wait."""

import shutil
from pathlib import Path

from refitd_client.contract.states import EngineState, WaitOutcome
from support.checkpoints import publish, tensors
from support.command_line import refitd
from support.hosts import RUN, Host, Hosts, hosts, until

ONE, TWO, THREE = (f"{RUN}~v00000{step}" for step in (1, 2, 3))


def led(all_: Hosts, *steps: int) -> Host:
    """A host that serves these steps, one after the other."""
    one = all_.led("one")
    for step in steps:
        version = all_.publish(step)
        until(lambda step=step: one.serves(step), all_.hub, one)
        assert all_.hub.client.wait(version, timeout=30).outcome is WaitOutcome.SERVED
    return one


def empty(hub: Host) -> None:
    """The hub loses its disk, and starts again."""
    hub.refitd.kill()
    for name in ("root", "state"):
        shutil.rmtree(hub.folder / name)
        (hub.folder / name).mkdir()
    hub.refitd.start()


def at_hub(hub: Host) -> tuple[EngineState, str | None]:
    """What the hub says of its host."""
    record = hub.client.engine("one")
    return record.state, record.version


def stays(hub: Host, one: Host, why: str) -> None:
    """The host says why it does not obey, wherever somebody looks, and its engines were told nothing meanwhile."""
    loaded = one.engines[0].loaded
    until(lambda: why in (one.following()["refused"] or ""), hub, one)
    until(lambda: why in (one.following()["fault"] or ""), hub, one)
    assert why in one.get("/v1/overview").json()["faults"]["upstream"]
    assert why in refitd("status", "--url", one.refitd.url).output.replace("\n", " ")
    until(lambda: why in (hub.client.engine("one").reason or ""), hub, one)
    assert at_hub(hub)[0] is not EngineState.IN_SYNC
    assert one.engines[0].loaded == loaded


def backed_up(all_: Hosts, folder: Path) -> Host:
    """A host that serves step 1, of a hub of which there is a backup."""
    one = led(all_, 1)
    all_.hub.refitd.stop()
    shutil.copytree(all_.hub.folder, folder / "backup")
    all_.hub.refitd.start()
    return one


def test_a_host_does_not_go_back_with_a_hub_that_was_restored_from_a_backup_until_its_operator_rolls_back(
    tmp_path: Path,
) -> None:
    with hosts(tmp_path) as all_:
        hub, one = all_.hub, backed_up(all_, tmp_path)
        version = all_.publish(2)
        until(lambda: one.serves(2), hub, one)
        assert hub.client.wait(version, timeout=30).outcome is WaitOutcome.SERVED
        hub.refitd.kill()
        for name in ("root", "state"):
            shutil.rmtree(hub.folder / name)
            shutil.copytree(tmp_path / "backup" / name, hub.folder / name)
        hub.refitd.start()
        stays(hub, one, f"wants {ONE}, and does not know {TWO}")
        one.refitd.restart()
        stays(hub, one, f"wants {ONE}, and does not know {TWO}")
        assert one.serves(2)
        assert hub.client.rollback_plan(RUN, ONE).unknown == [TWO]
        said = refitd("rollback", RUN, "--to", ONE, "--yes", "--url", hub.refitd.url)
        assert f"Hosts have {TWO}, which this service does not know" in said.output.replace("\n", " ")
        until(lambda: one.serves(1) and one.following()["refused"] is None, hub, one)
        until(lambda: at_hub(hub) == (EngineState.IN_SYNC, ONE), hub, one)
        third = all_.publish(3)
        until(lambda: one.serves(3) and at_hub(hub) == (EngineState.IN_SYNC, third), hub, one)


def said(*command: str, at: Host) -> str:
    """What a command says, in one line."""
    own = ("--root", str(at.root), "--state", str(at.folder / "state")) if command == ("doctor",) else ()
    return " ".join(refitd(*command, *own, "--url", at.refitd.url).output.split())


def test_a_hub_that_was_emptied_says_what_its_hosts_have_and_what_helps_before_anything_is_published(
    tmp_path: Path,
) -> None:
    with hosts(tmp_path) as all_:
        hub = all_.hub
        one = led(all_, 1, 2)
        empty(hub)
        why = f"has {TWO}, which is not known here, as after a loss of this service's root or journal"
        until(lambda: any(why in (each.reason or "") for each in hub.client.engines().items), hub, one)
        for command in (("status",), ("engines",), ("explain", RUN), ("explain", "one"), ("doctor",)):
            assert why in said(*command, at=hub), command
        assert "something newer is published (a publisher that is opened now begins after it)" in said("status", at=hub)
        there = f"does not know {TWO}, which engines here serve"
        until(lambda: there in (one.following()["fault"] or ""), hub, one)
        for command in (("status",), ("explain", RUN), ("doctor",)):
            assert there in said(*command, at=one), command
        assert "took the last report of this host" in said("explain", RUN, at=one)
        assert one.serves(2)
        third = all_.publish(3)
        until(lambda: one.serves(3) and at_hub(hub) == (EngineState.IN_SYNC, third), hub, one)
        assert "not known" not in said("status", at=hub)
        assert "does not know" not in said("status", at=one)


def test_a_trainer_that_begins_again_on_an_emptied_hub_begins_a_generation_and_hosts_go_there_by_themselves(
    tmp_path: Path,
) -> None:
    with hosts(tmp_path) as all_:
        hub = all_.hub
        one = led(all_, 1, 2)
        empty(hub)
        until(lambda: hub.client.versions(RUN).on_hosts == TWO, hub, one)
        first = all_.publish(1, tensors(7))
        assert first == f"{RUN}~v000001.g2"
        until(lambda: at_hub(hub) == (EngineState.IN_SYNC, first), hub, one)
        assert [path.rpartition("/")[2] for path in one.engines[0].loaded] == ["v000001", "v000002", "v000001.g2"]


def test_a_host_serves_no_version_of_before_for_one_of_that_name_after_its_hub_was_emptied(tmp_path: Path) -> None:
    """The trainer's publisher could not ask the hub: names are used a second time."""
    with hosts(tmp_path) as all_:
        hub = all_.hub
        one = led(all_, 1, 2)
        empty(hub)
        publish(hub.root, RUN, 2, tensors(8))
        stays(hub, one, f"has another {TWO} than this host")
        assert "another writer" not in said("status", at=hub) + said("explain", "one", at=hub) + said("doctor", at=hub)
        waited = hub.client.wait(TWO, timeout=0).outcome
        assert waited is not WaitOutcome.SERVED, "the host serves another version of that name"
        assert one.following()["serves"] == TWO
        third = all_.publish(3, tensors(9))
        until(lambda: one.serves(3) and at_hub(hub) == (EngineState.IN_SYNC, third), hub, one)


def test_of_two_hubs_a_host_does_not_go_back_with_the_one_that_knows_less_and_finds_the_other_again(
    tmp_path: Path,
) -> None:
    with hosts(tmp_path / "a") as all_, hosts(tmp_path / "b") as others:
        hub, other = all_.hub, others.hub
        others.publish(1)
        one = all_.led("one", "--follow", other.refitd.url)
        for step in (1, 2):
            all_.publish(step)
            until(lambda step=step: one.serves(step), hub, one)
        hub.refitd.kill()
        why = f"wants {ONE}, and does not know {TWO}"
        until(lambda: why in (one.following()["refused"] or ""), other, one)
        assert one.serves(2)
        hub.refitd.start()
        all_.publish(3)
        until(lambda: one.serves(3) and one.following()["refused"] is None, hub, one)
        assert [path.rpartition("/")[2] for path in one.engines[0].loaded] == ["v000001", "v000002", "v000003"]


def test_a_host_that_is_led_leads_no_hosts_and_says_whom_to_follow(tmp_path: Path) -> None:
    with hosts(tmp_path) as all_:
        hub, between = all_.hub, all_.led("between")
        below = all_.led("below", url=between.refitd.url)
        until(lambda: "leads no hosts" in (below.following()["fault"] or ""), between, below)
        assert f"follow {hub.refitd.url}, or start it with --follow-freely" in below.following()["fault"]
        first = all_.publish(1)
        assert hub.client.wait(first, timeout=30).outcome is WaitOutcome.SERVED
        assert [engine.id for engine in hub.client.engines().items] == ["between"]
        assert not below.serves(1)


def test_a_host_that_decides_for_itself_leads_hosts_of_its_own(tmp_path: Path) -> None:
    with hosts(tmp_path) as all_:
        hub, between = all_.hub, all_.follower("between")
        below = all_.led("one", url=between.refitd.url)
        for step in (1, 2):
            all_.publish(step)
            until(lambda step=step: between.serves(step) and below.serves(step), hub, between, below)
        until(lambda: at_hub(between) == (EngineState.IN_SYNC, TWO), between, below)
        hub.client.rollback(RUN, ONE)
        until(lambda: between.serves(1) and below.serves(1), hub, between, below)
        until(lambda: at_hub(between) == (EngineState.IN_SYNC, ONE), between, below)


def test_a_host_that_comes_back_with_other_engines_is_proved_anew(tmp_path: Path) -> None:
    with hosts(tmp_path) as all_:
        hub = all_.hub
        one = led(all_, 1)
        one.refitd.kill()
        anew = all_.host("one", "--follow", hub.refitd.url, "--follower", "one", engines=2)
        with anew.refitd:
            seen = hub.refitd.log.read_text().count("\n")
            until(lambda: anew.serves(1) and at_hub(hub) == (EngineState.IN_SYNC, ONE), hub, anew)
            until(lambda: getattr(hub.client.engine("one").host, "count", 0) == 2, hub, anew)
            later = hub.refitd.log.read_text().splitlines()[seen:]
            assert not any("TAINTED" in line or "QUARANTINED" in line for line in later)
