"""Only a layout that is known is taken, and where none is, nothing is wrapped."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from refitd_sglang import plugin
from refitd_sglang.plugin import FUNCTION, SglangLayout, find_layout, layout_of
from refitd_sglang.process import SglangProcess
from support.mini_sglang import Updater, make_loader


class Unknown:
    """Releases that nobody has looked at."""

    class MoreArguments:
        def update_weights_from_disk(self, model_path: str, load_format: str, manifest: str) -> None:
            """It calls _get_weights_iterator and load_weights_and_postprocess."""

    class FewerArguments:
        def update_weights_from_disk(self, request: Any) -> None:
            """It calls _get_weights_iterator and load_weights_and_postprocess."""

    class AnotherWay:
        def update_weights_from_disk(self, model_path: str, load_format: str) -> None:
            """It has a way of its own."""


@pytest.mark.parametrize("owner", [Unknown.MoreArguments, Unknown.FewerArguments, Unknown.AnotherWay])
def test_a_function_that_is_not_the_known_one_is_left_alone(owner: type) -> None:
    assert isinstance(layout_of("sglang", owner, make_loader()), str)


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Modules in place of SGLang's, and what is registered with it."""
    registered: list[str] = []
    hooks = SimpleNamespace(register=lambda target, hook, kind: registered.append(target))
    content: dict[str, dict[str, Any]] = {
        "sglang.srt.model_loader.loader": {"DefaultModelLoader": make_loader()},
        "sglang.srt.model_executor.model_runner": {"ModelRunner": Updater},
        "sglang.srt.plugins.hook_registry": {
            "HookRegistry": hooks,
            "HookType": SimpleNamespace(AROUND="around", AFTER="after"),
        },
        "sglang.srt.managers.scheduler": {},
    }
    for name, members in content.items():
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            part = ".".join(parts[:length])
            if part not in sys.modules:
                monkeypatch.setitem(sys.modules, part, ModuleType(part))
        vars(sys.modules[name]).update(members)
    return SimpleNamespace(registered=registered)


def test_the_runner_of_older_releases_is_found(sglang: SimpleNamespace) -> None:
    layout = find_layout()
    assert isinstance(layout, SglangLayout)
    assert layout.target == f"sglang.srt.model_executor.model_runner.Updater.{FUNCTION}"


def test_the_component_of_newer_releases_comes_first(sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    component = ModuleType(plugin._COMPONENT)
    component.WeightUpdater = type("WeightUpdater", (), {FUNCTION: Updater.update_weights_from_disk})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, plugin._COMPONENT, component)
    layout = find_layout()
    assert isinstance(layout, SglangLayout)
    assert layout.module == plugin._COMPONENT


def test_a_layout_that_is_known_is_wrapped_once(sglang: SimpleNamespace) -> None:
    plugin.register()
    assert [name.rsplit(".", 1)[1] for name in sglang.registered] == [FUNCTION, "__init__"]


def test_nothing_is_wrapped_when_it_is_off(sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFITD_SGLANG", "off")
    plugin.register()
    assert sglang.registered == []


def test_a_variable_that_is_not_understood_is_for_the_channel_to_say(
    sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REFITD_SGLANG_WAIT", "soon")
    plugin.register()
    assert [name.rsplit(".", 1)[1] for name in sglang.registered] == [FUNCTION, "__init__"]


def test_nothing_is_wrapped_in_an_unknown_release_and_it_is_said_once(
    sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = sys.modules["sglang.srt.model_executor.model_runner"]
    monkeypatch.setattr(module, "ModelRunner", Unknown.AnotherWay)
    plugin.register()
    assert sglang.registered == []
    assert len([record for record in caplog.records if "stands aside" in record.message]) == 1


def test_a_process_without_weights_is_left_alone(sglang: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "sglang.srt.managers.scheduler")
    plugin.register()
    assert sglang.registered == []


@pytest.mark.parametrize(
    ("args", "aside"),
    [
        ({}, False),
        ({"pp_size": 2}, True),
        ({"enable_eplb": True}, True),
        ({"speculative_algorithm": "EAGLE"}, True),
        ({"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "/base", "model_path": "/base"}, True),
        ({"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "/draft", "model_path": "/base"}, False),
        ({"speculative_algorithm": "NGRAM"}, False),
    ],
)
def test_engines_whose_parts_are_updated_in_turn_are_left_to_sglang(args: dict[str, Any], aside: bool) -> None:
    updater = Updater(model=None, model_config=SimpleNamespace(), loader=object, server_args=SimpleNamespace(**args))
    assert (SglangProcess(updater, object).aside() is not None) == aside


@pytest.mark.parametrize(
    ("place", "dp_rank"),
    [
        ({"dp_rank": None, "attn_dp_size": 1, "attn_dp_rank": 0}, None),
        ({"dp_rank": 1, "attn_dp_size": 1, "attn_dp_rank": 0}, 1),
        ({"dp_rank": None, "attn_dp_size": 2, "attn_dp_rank": 1}, 1),
    ],
)
def test_its_data_parallel_rank_is_known_where_the_process_alone_has_it(
    place: dict[str, Any], dp_rank: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = SimpleNamespace(get_parallel=lambda: SimpleNamespace(**place))
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    updater = Updater(model=None, model_config=SimpleNamespace(), loader=object)
    assert SglangProcess(updater, object).dp_rank == dp_rank
    updater.__dict__["dp_rank"] = 7  # as in releases whose runner has it
    assert SglangProcess(updater, object).dp_rank == 7
