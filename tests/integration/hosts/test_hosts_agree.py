"""Two hosts and their engines load each version at one moment: what each proves is held against the other."""

from pathlib import Path

from refitd_client.contract.states import WaitOutcome
from support.hosts import RUN, Host, hosts, until

AGREED = {"checksums of tensors", "checksums of tensors, of the host's engines"}
EQUAL = "They were compared with those of another load of the version, and are equal."


def proofs(*of: Host) -> set[str | None]:
    return {engine.proof for host in of for engine in host.client.engines().items}


def test_hosts_and_engines_that_load_at_one_moment_prove_each_other_also_after_a_rollback_to_the_first_version(
    tmp_path: Path,
) -> None:
    with hosts(tmp_path, "--quorum", "2") as all_:
        hub, one, other = all_.hub, all_.led("one", engines=2), all_.led("other", engines=2)
        until(lambda: len(hub.client.engines().items) == 2, hub, one, other)
        first = all_.publish(1)
        assert hub.client.wait(first, timeout=30).outcome is WaitOutcome.SERVED
        until(lambda: proofs(hub, one, other) == AGREED, hub, one, other)
        assert hub.client.wait(all_.publish(2), timeout=30).outcome is WaitOutcome.SERVED
        until(lambda: proofs(hub, one, other) == AGREED, hub, one, other)
        hub.client.rollback(RUN, first)
        until(lambda: {each.version for each in hub.client.engines().items} == {first}, hub, one, other)
        assert proofs(hub, one, other) == AGREED
        for name in ("one", "other"):
            assert any(EQUAL in sentence for sentence in hub.client.explain(name).sentences)
        for host in (one, other):
            assert [len(engine.loaded) for engine in host.engines] == [3, 3], "none was loaded once more"
