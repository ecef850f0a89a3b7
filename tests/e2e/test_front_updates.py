"""SGLang's calls at the front of two engines, and what these serve: every way in which its trainers update."""

import shutil
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
import torch

from support.fronted import Fronted, fronted
from support.jobs import served_by
from support.servers import EmbeddedServer
from support.sglang_trainer import Tensors, sglang_trainer, tensors_of
from support.slime_updates import overwrite, write_delta, xor

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]
LAST = "model.norm.weight"


@pytest.fixture
def updated(models: Path, tmp_path: Path) -> Generator[Fronted]:
    with fronted(models, tmp_path) as updated:
        yield updated


def test_each_way_of_sglangs_trainers_brings_all_engines_to_what_a_clean_load_of_the_same_weights_answers(
    models: Path, tmp_path: Path, updated: Fronted
) -> None:
    (tmp_path / "clean").mkdir()
    with EmbeddedServer(tmp_path / "clean", models / "model_b") as clean:
        expected = {"model_a": updated.answers[0], "model_b": served_by(clean).answer}
    assert expected["model_a"] != expected["model_b"]
    weights = {name: tensors_of(models / name) for name in expected}
    with sglang_trainer(updated.front.url) as trainer:
        assert trainer.connect() == ""
        ways = [
            lambda label, name: trainer.by_disk(updated.saved(models / name, label), label),
            lambda label, name: trainer.as_slime(weights[name], label),
            lambda label, name: trainer.as_miles(weights[name], label),
            lambda label, name: trainer.as_sglang(weights[name], label),
            lambda label, name: trainer.by_pull(
                updated.saved(models / name, f"weight_v{int(label):06d}").parent, int(label)
            ),
        ]
        for number, way in enumerate(ways, start=1):
            for label, name in ((str(2 * number), "model_b"), (str(2 * number + 1), "model_a")):
                assert way(label, name) == ""
                assert updated.answers == [expected[name]] * 2, (number, name)
                assert updated.labels == [label, label]
        assert trainer.generates
    assert updated.is_well


def _with_nan(tensors: Tensors) -> Tensors:
    return {**tensors, LAST: torch.full_like(tensors[LAST], torch.nan)}


def _unknown(tensors: Tensors) -> Tensors:
    return {**tensors, "model.layers.7.no_such.weight": torch.ones(4)}


def _lacking(tensors: Tensors) -> Tensors:
    return {name: each for name, each in tensors.items() if name != LAST}


def _turned(tensors: Tensors) -> Tensors:
    name = "model.embed_tokens.weight"
    return {**tensors, name: tensors[name].t().contiguous()}


def test_weights_that_are_wrong_are_an_error_in_a_sentence_and_the_next_ones_are_served(
    models: Path, updated: Fronted
) -> None:
    before = updated.answers
    good = tensors_of(models / "model_b")
    assert {"model.embed_tokens.weight", LAST} < good.keys()
    with sglang_trainer(updated.front.url) as trainer:
        assert trainer.connect() == ""
        cases = {_with_nan: "NaN", _unknown: "no_such", _lacking: LAST, _turned: "model.embed_tokens.weight"}
        for number, (way, (wrong, named)) in enumerate(product((trainer.as_slime, trainer.as_miles), cases.items())):
            said = way(wrong(good), str(number + 1))
            assert named in said, (wrong, said)
            trainer.post("continue_generation")  # as one does that goes on all the same
            assert trainer.generates
            assert (updated.answers, updated.labels) == (before, ["default"] * 2), wrong
        assert trainer.as_slime(good, "100") == ""
        assert updated.labels == ["100", "100"]
        assert "not above 100" in trainer.as_miles(tensors_of(models / "model_a"), "100")
        assert updated.labels == ["100", "100"]
        assert updated.answers[0] == updated.answers[1] != before[0]
    assert updated.is_well


def _shorter(tensors: Tensors) -> Tensors:
    return {**tensors, LAST: tensors[LAST][:-1].clone()}


def _longer(tensors: Tensors) -> Tensors:
    return {**tensors, LAST: tensors[LAST].float()}


def test_a_broadcast_that_is_not_what_its_calls_say_or_whose_trainer_dies_is_an_error_and_the_next_one_is_served(
    models: Path, updated: Fronted
) -> None:
    before, good = updated.answers, tensors_of(models / "model_b")
    for number, wrong in enumerate((_shorter, _longer, None), start=1):
        with sglang_trainer(updated.front.url) as trainer, ThreadPoolExecutor() as threads:
            assert trainer.connect() == ""
            if wrong is None:
                trainer.pause()
                assert trainer.broadcast(dict(list(good.items())[:5]), most=2) == ""
                said = threads.submit(trainer.announce, dict(list(good.items())[5:8]))
                trainer.rank.send(dict(list(good.items())[5:6]))  # the first of three
                assert trainer.rank.done() == ""
                trainer.rank.kill()
                refused = said.result()
            else:
                refused = trainer.as_slime(wrong(good), str(number), good)
            assert "has not arrived" in refused
            assert "has not arrived" in trainer.post("continue_generation")
            assert trainer.generates
            assert (updated.answers, updated.labels) == (before, ["default"] * 2), wrong
            assert updated.is_well
    with sglang_trainer(updated.front.url) as trainer:
        assert trainer.connect() == ""
        assert trainer.as_miles(good, "1") == ""
    assert updated.labels == ["1", "1"]
    assert updated.answers[0] == updated.answers[1] != before[0]
    assert updated.is_well


def test_deltas_that_are_pulled_are_served_as_the_weights_that_they_lead_to_also_by_a_front_that_was_restarted(
    models: Path, updated: Fronted
) -> None:
    """As slime's and miles' `--update-weight-transport disk` with deltas: version 0 is what the engines began with."""
    first, second = tensors_of(models / "model_a"), tensors_of(models / "model_b")
    answers = {"model_a": updated.answers}
    deltas = updated.folder / "deltas"
    pulled = {"local_checkpoint_dir": "/local/checkpoint", "source_dir": str(deltas)}
    with sglang_trainer(updated.front.url) as trainer:
        assert trainer.post("pull_weights", **pulled, target_version=0) == ""
        assert "No such file" in trainer.post("pull_weights", **pulled, target_version=1)
        write_delta(deltas, 1, first, second, xor)
        assert trainer.by_pull(deltas, 1) == ""
        answers["model_b"] = updated.answers
        assert answers["model_b"][0] == answers["model_b"][1] != answers["model_a"][0]
        write_delta(deltas, 2, second, first, overwrite)
        assert trainer.by_pull(deltas, 2) == ""
        assert trainer.by_pull(deltas, 2) == "", "the same once more changes nothing"
        assert (updated.answers, updated.labels) == (answers["model_a"], ["2", "2"])

        updated.front.restart()
        write_delta(deltas, 3, first, second, xor)
        assert trainer.by_pull(deltas, 3) == ""
        assert (updated.answers, updated.labels) == (answers["model_b"], ["3", "3"])
        write_delta(deltas, 5, second, first, xor)
        assert "a delta of version 000004 cannot be applied" in trainer.by_pull(deltas, 5)
        write_delta(deltas, 4, first, second, xor)  # of other weights than it says
        assert "does not lead to the checksum" in trainer.by_pull(deltas, 4)
        assert trainer.post("continue_generation") == ""
        assert (updated.answers, updated.labels, trainer.generates) == (answers["model_b"], ["3", "3"], True)

        shutil.rmtree(deltas)  # a trainer that is started again, as it does
        assert trainer.post("pull_weights", **pulled, target_version=0) == ""
        write_delta(deltas, 1, first, first | {LAST: second[LAST]}, xor)
        assert trainer.by_pull(deltas, 1) == ""
        assert updated.labels == ["1.g2", "1.g2"]  # its steps begin again in another generation
    assert updated.is_well
