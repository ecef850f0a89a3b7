"""When an engine is believed: names must agree, and contents decide where they can be compared."""

from dataclasses import dataclass

import pytest

from refitd.engine import transaction
from refitd.engine.port import Target
from refitd.engine.sglang.info import ModelInfo

NEW, OLD, OTHER = "xxh3:new", "xxh3:old", "xxh3:other"


@dataclass(frozen=True)
class Says:
    """What an engine says of itself after a load."""

    names: ModelInfo
    contents: str | None


def says(contents: str | None, *, path: str = "/root/v7", label: str | None = "7") -> Says:
    return Says(ModelInfo(model_path=path, weight_version=label), contents)


def doubt(seen: Says, wanted: Target, *, unchanged: bool) -> str | None:
    named = seen.names.other_than(wanted.path, wanted.label)
    return named or transaction.doubt(seen.contents, wanted, unchanged=unchanged)


def target(recorded: str | None = None, before: str | None = None) -> Target:
    return Target(path="/root/v7", label="7", fingerprint=recorded, not_fingerprint=before)


@pytest.mark.parametrize(
    ("seen", "wanted"),
    [
        (says(NEW), target(recorded=NEW)),
        (says(NEW), target(recorded=NEW, before=OLD)),
        (says(NEW), target(before=OLD)),
        (says(NEW), target()),
        (says(None), target(recorded=NEW, before=OLD)),  # a server without checksums: names are all there is
        # The files differ, the tensors do not: a clean load gave the same before, so it is no sign of a load undone.
        (says(OLD), target(recorded=OLD, before=OLD)),
    ],
)
def test_an_engine_is_believed(seen: Says, wanted: Target) -> None:
    assert doubt(seen, wanted, unchanged=True) is None


@pytest.mark.parametrize(
    ("seen", "wanted"),
    [
        (says(NEW), target()),
        (says(NEW), target(before=OLD)),
        (says(None), target(recorded=NEW)),
        (says(OTHER), target(recorded=NEW)),
    ],
)
def test_files_that_changed_during_the_load_leave_contents_that_nobody_vouches_for(seen: Says, wanted: Target) -> None:
    assert "its files changed" in (doubt(seen, wanted, unchanged=False) or "")


def test_contents_that_a_clean_load_gave_before_are_right_whatever_became_of_the_files() -> None:
    assert doubt(says(NEW), target(recorded=NEW, before=OLD), unchanged=False) is None


@pytest.mark.parametrize(
    ("seen", "wanted", "because"),
    [
        (says(NEW, path="/root/v6"), target(recorded=NEW), "serves /root/v6, not /root/v7"),
        (says(NEW, label="6"), target(recorded=NEW), "weight_version '6', not '7'"),
        (says(NEW, label=None), target(recorded=NEW), "weight_version None"),
        (says(None, label="6"), target(), "weight_version '6'"),
        (says(OTHER), target(recorded=NEW), "not those that a clean load of this version gave"),
        (says(OLD), target(recorded=NEW, before=OLD), "not those that a clean load"),
        (says(OLD), target(before=OLD), "have not changed"),
    ],
)
def test_an_engine_is_doubted_and_the_reason_told(seen: Says, wanted: Target, because: str) -> None:
    assert because in (doubt(seen, wanted, unchanged=True) or "")
