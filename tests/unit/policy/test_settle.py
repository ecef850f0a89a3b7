"""Whether a checkpoint is still being written."""

from refitd.policy.admit import Complete, FolderLook, NeverSettles, Settling, StillWritten, settle

RULES = {"settle_for": 1.0, "timeout": 60.0}


def look(signature: str = "s", *, final: bool = False, fault: str | None = None) -> FolderLook:
    return FolderLook(signature=signature, final=final, fault=fault)


def test_a_manifest_means_complete() -> None:
    assert settle(look(final=True), None, 0.0, **RULES) == Complete()


def test_a_checkpoint_without_manifest_is_complete_when_nothing_changes_for_a_while() -> None:
    first = settle(look(), None, 10.0, **RULES)
    assert isinstance(first, StillWritten)
    assert first.until == 11.0
    assert settle(look(), first.memory, 11.0, **RULES) == Complete()


def test_a_shard_that_is_still_growing_starts_the_wait_again() -> None:
    memory = Settling(signature="small", since=10.0)
    again = settle(look("larger"), memory, 10.9, **RULES)
    assert isinstance(again, StillWritten)
    assert again.memory == Settling(signature="larger", since=10.9)


def test_an_announced_checkpoint_that_agrees_is_not_waited_for() -> None:
    assert settle(look(), None, 0.0, settle_for=0.0, timeout=60.0) == Complete()


def test_a_shard_that_comes_late_is_waited_for() -> None:
    found = settle(look(fault="shard 2 is missing"), None, 5.0, **RULES)
    assert isinstance(found, StillWritten)
    assert found.reason == "incomplete: shard 2 is missing; rejected when nothing has changed for 60 s"


def test_a_checkpoint_that_stays_incomplete_is_hopeless() -> None:
    memory = Settling(signature="s", since=0.0)
    found = settle(look(fault="shard 2 is missing"), memory, 60.0, **RULES)
    assert isinstance(found, NeverSettles)
    assert "shard 2 is missing" in found.reason


def test_what_a_trainer_writes_last_is_waited_for_as_long_as_it_takes() -> None:
    memory = Settling(signature="s", since=0.0)
    waits = FolderLook(signature="s", final=False, fault=None, awaits="STABLE is not there")
    found = settle(waits, memory, 10_000.0, **RULES)
    assert isinstance(found, StillWritten)
    assert (found.reason, found.until) == ("STABLE is not there", 10_010.0)
