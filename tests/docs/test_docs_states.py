"""The page on concepts says of every state what it means, and of none that there is not."""

import re
from enum import EnumMeta

import pytest
from blocks import TREE

from refitd_client.contract import states

PAGE = (TREE / "docs/concepts.md").read_text()
HEADINGS = {
    states.VersionState: "States of a version",
    states.EngineState: "States of an engine",
    states.UpdateState: "States of an update",
    states.Standing: "How a run stands",
}


@pytest.mark.parametrize("kind", HEADINGS, ids=lambda kind: kind.__name__)
def test_every_state_is_explained_once_in_its_table(kind: type[states.VersionState]) -> None:
    (section,) = re.findall(rf"^### {HEADINGS[kind]}\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    explained = re.findall(r"^\| ([A-Z_]+) \| \w[^|]+ \|$", section, re.MULTILINE)
    assert sorted(explained) == sorted(state.value for state in kind)


def test_no_kind_of_state_is_forgotten() -> None:
    kinds = {
        kind for kind in vars(states).values() if isinstance(kind, EnumMeta) and kind.__module__ == states.__name__
    }
    others = {states.Kind, states.WaitOutcome, states.LogSeverity, states.VersionGlance, states.EngineGlance}
    assert kinds - others == HEADINGS.keys()


@pytest.mark.parametrize("kind", [states.VersionState, states.EngineState], ids=lambda kind: kind.__name__)
def test_what_is_shown_at_a_glance_stands_for_the_states_that_the_page_says(
    kind: type[states.VersionState | states.EngineState],
) -> None:
    (section,) = re.findall(r"^### At a glance\n(.*?)(?=^##)", PAGE, re.MULTILINE | re.DOTALL)
    rows = {
        word: set(listed.split(", "))
        for word, listed in re.findall(r"^\| ([a-z ]+) \| ([A-Z_, ]+) \|$", section, re.MULTILINE)
    }
    for state in kind:
        assert [word for word, listed in rows.items() if state.value in listed] == [state.glance]
