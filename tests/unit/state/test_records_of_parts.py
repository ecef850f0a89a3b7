"""Records of engines and versions consist of parts that fit in a head, and a fact has one place."""

from collections import Counter
from dataclasses import fields
from typing import Any

import pytest

from refitd.state.parts import Parted
from refitd.state.records import EngineRecord
from refitd.state.version import VersionRecord
from support.records import engine, version

MOST_FIELDS = 12
RECORDS: list[Any] = [engine(), version(1)]


@pytest.mark.parametrize("record", RECORDS, ids=["engine", "version"])
def test_no_part_has_more_than_twelve_fields_and_no_two_facts_one_name(record: Any) -> None:
    kinds = [record, *(getattr(record, part) for part in record.PARTS)]
    assert max(len(fields(kind)) for kind in kinds) <= MOST_FIELDS
    names = Counter(each.name for kind in kinds for each in fields(kind))
    assert [name for name, count in names.items() if count > 1] == []


def test_a_change_puts_each_fact_into_its_part_and_leaves_the_record_before_as_it_was() -> None:
    before = engine(serving="run~v000001", plugin="1")
    after = before.having(run="other", serving=None, reason="why", plugin=None)
    assert (after.run, after.contents.serving, after.trouble.reason, after.seen.plugin) == ("other", None, "why", None)
    assert before == engine(serving="run~v000001", plugin="1")
    assert after.contents.known, "other facts of the part stay"


@pytest.mark.parametrize("record", RECORDS, ids=["engine", "version"])
def test_a_fact_that_no_part_has_is_refused(record: EngineRecord | VersionRecord) -> None:
    assert isinstance(record, Parted)
    with pytest.raises(TypeError, match="nonsense"):
        record.having(nonsense=1)
