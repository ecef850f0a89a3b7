"""A source of weights of one process is published as its state dict would be, and only where it keeps its word."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from refitd_client import InvalidWeightsError, PublishError, PublishOptions, WeightPublisher
from refitd_client.contract.states import Kind
from refitd_client.publish import ports
from refitd_client.publish.options import DeltaRules
from refitd_client.tensors import is_source
from refitd_client.trainers.weight_source import WholeReading
from support import published
from support.stand_in_service import make_engine, stand_in
from support.weight_sources import ParamMeta, Source, Split, described

Tensors = dict[str, torch.Tensor]


def model() -> Tensors:
    return {
        "embed": torch.arange(12.0).reshape(4, 3),
        "norm": torch.ones(3),
        "head": torch.full((3, 4), 2.0).half(),
    }


def test_a_source_is_published_as_its_state_dict(tmp_path: Path) -> None:
    options = PublishOptions(rename={"norm": "final.norm"}, dtype=torch.bfloat16, max_shard_bytes=60)
    for run, weights in (("source", Source(model())), ("state", model())):
        with WeightPublisher(tmp_path, run, options=options) as publisher:
            publisher.publish(weights, step=1)
    assert published.files(tmp_path / "source/v000001") == published.files(tmp_path / "state/v000001")


def test_each_publication_reads_the_source_once_more(tmp_path: Path) -> None:
    source = Source(model())
    with WeightPublisher(tmp_path, "run") as publisher:
        for step in (1, 2):
            source.tensors["norm"].fill_(step)
            publisher.publish(source, step=step, block="staged")
    assert [float(published.tensors(tmp_path / f"run/v00000{step}")["norm"][0]) for step in (1, 2)] == [1.0, 2.0]
    assert source.passes == 2


def test_a_source_of_numpy_arrays_is_published_without_torch(tmp_path: Path) -> None:
    source: Any = Source({"w": np.arange(3, dtype=np.float32)})  # type: ignore[dict-item]
    with WeightPublisher(tmp_path, "run") as publisher:
        publisher.publish(source, step=1)
    assert published.tensors(tmp_path / "run/v000001")["w"].tolist() == [0.0, 1.0, 2.0]


def test_what_changed_of_a_source_is_a_delta(tmp_path: Path) -> None:
    source = Source({"w": torch.zeros(100)})
    options = PublishOptions(delta_rules=DeltaRules(threshold=0.2))
    with stand_in() as service, WeightPublisher(tmp_path, "run", service.url, options=options) as publisher:
        first = publisher.publish(source, step=1, transport="delta")
        service.engines = [make_engine("engine", version=first.version_id, step=1, run="run")]
        source.tensors["w"][7] = 1
        second = publisher.publish(source, step=2, transport="delta")
    assert (second.kind, second.base, second.density) == (Kind.DELTA, first.version_id, 0.01)


class _Without(Source):
    """Yields all but one."""

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        yield from [(name, each) for name, each in self.tensors.items() if name != "norm"]
        self.passes += 1


class _None(Source):
    """Says that it holds everything, and yields nothing for one name."""

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        yield from [(name, None if name == "norm" else each) for name, each in self.tensors.items()]
        self.passes += 1


class _Holding(Source):
    """Says that it holds what it does not describe."""

    def held_names(self) -> Collection[str]:
        return [*self.tensors, "tail"]


def _said(**other: ParamMeta) -> list[ParamMeta]:
    return [other.get(each.name, each) for each in described(model())]


DISAGREEING: dict[str, tuple[Source, str, str]] = {
    "order": (
        Source(model(), [each for name in ("norm", "embed", "head") for each in _said() if each.name == name]),
        "norm",
        "is the next in metadata() of its source, which yields embed in its place",
    ),
    "name": (Source(model(), _said(norm=ParamMeta("scale", torch.float32, (3,)))), "scale", "which yields norm"),
    "dtype": (
        Source(model(), _said(head=ParamMeta("head", torch.float32, (3, 4)))),
        "head",
        "is yielded as float16 of shape [3, 4], and metadata() says float32 of shape [3, 4]",
    ),
    "shape": (
        Source(model(), _said(embed=ParamMeta("embed", torch.float32, (8, 3)))),
        "embed",
        "is yielded as float32 of shape [4, 3], and metadata() says float32 of shape [8, 3]: sources yield whole",
    ),
    "more": (Source(model(), _said()[:2]), "head", "is yielded by its source after all that metadata() has"),
    "fewer": (
        Source(model(), [*_said(), ParamMeta("tail", torch.float32, (1,))]),
        "tail",
        "stands in the metadata() of its source, which does not yield it",
    ),
    "without": (_Without(model()), "norm", "which yields head in its place"),
    "none": (_None(model()), "norm", "is held by this rank, and its source yields None"),
}
CONTRADICTING: dict[str, tuple[Source, str, str]] = {
    "twice": (Source(model(), [*_said(), _said()[0]]), "embed", "stands twice in the metadata() of its source"),
    "unknown": (_Holding(model()), "tail", "is in held_names() of its source, and not in metadata()"),
    "nobody's": (Split(model(), ["embed", "head"]), "norm", "is held by none of the ranks that publish"),
}


@pytest.mark.parametrize("case", [*DISAGREEING, *CONTRADICTING])
def test_a_source_that_does_not_keep_its_word_is_refused_by_the_first_parameter_and_nothing_is_published(
    case: str, tmp_path: Path
) -> None:
    source, name, why = (DISAGREEING | CONTRADICTING)[case]
    with WeightPublisher(tmp_path, "run") as publisher:
        with pytest.raises(InvalidWeightsError) as raised:
            publisher.publish(source, step=1)
        assert (raised.value.tensor, published.versions(tmp_path / "run")) == (name, [])
        assert str(raised.value).startswith(f"tensor {name} ")
        assert why in str(raised.value)
        publisher.publish(Source(model()), step=1)
    assert published.whole(tmp_path / "run") == ["v000001"]
    assert source.passes == (case in DISAGREEING)  # to its end: other ranks would wait in a collective


def test_weights_of_other_kinds_are_no_sources() -> None:
    class WithMetadata(torch.nn.Sequential):
        def metadata(self) -> None: ...

    class Named(dict[str, torch.Tensor]):
        def metadata(self) -> None: ...

    assert is_source(Source(model()))
    assert not any(map(is_source, [WithMetadata(), Named(), model(), "/folder", Path("/folder"), [1.0], None]))


def test_without_the_ring_a_source_is_refused_by_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "part", lambda _: None)
    with (
        WeightPublisher(tmp_path, "run") as publisher,
        pytest.raises(PublishError, match="reads no sources of weights"),
    ):
        publisher.publish(Source(model()), step=1)


SIZES = {"a": 8, "b": 4, "c": 2, "d": 2, "e": 1}


def _shares(*held: Collection[str] | None) -> list[list[str]]:
    """What each rank is to keep of parameters of these sizes, by what it holds."""
    tensors = {name: torch.zeros(size) for name, size in SIZES.items()}
    readings = [WholeReading(Source(tensors) if names is None else Split(tensors, names)) for names in held]
    return [[[*SIZES][number] for number in share] for share in readings[0].shares([each.word for each in readings])]


def test_ranks_that_hold_everything_divide_it_by_size() -> None:
    assert _shares(None, None) == [["a", "e"], ["b", "c", "d"]]
    assert _shares(None, None, None) == [["a"], ["b", "e"], ["c", "d"]]


def test_what_several_ranks_hold_is_kept_by_one_of_them() -> None:
    assert _shares("ab", "bcde") == [["a"], ["b", "c", "d", "e"]]
    assert _shares("abcd", "de", None) == [["a"], ["d", "e"], ["b", "c"]]


def test_a_name_that_would_lose_its_beginning_on_one_rank_alone_is_refused() -> None:
    """DDP's mark stands before all names or none."""
    for names, is_good in ((("module.a", "module.b"), True), (("a", "module.b"), False), (("a", "b.module.c"), True)):
        reading = WholeReading(Source({name: torch.ones(1) for name in names}))
        if is_good:
            assert reading.shares([reading.word] * 2) == ((0,), (1,))
        else:
            with pytest.raises(InvalidWeightsError, match=r"module\.b begins with 'module\.'"):
                reading.shares([reading.word] * 2)


def test_ranks_that_do_not_describe_the_same_are_named_with_the_first_parameter() -> None:
    first = WholeReading(Source(model()))
    others = {
        "norm": (Source(model(), _said(norm=ParamMeta("norm", torch.float64, (3,)))), "norm stands otherwise"),
        "shorter": (Source(model(), _said()[:2]), "head stands otherwise"),
        "longer": (Source(model(), [*_said(), ParamMeta("tail", torch.float16, (1,))]), "has 4 parameters on rank 1"),
    }
    for source, why in others.values():
        with pytest.raises(InvalidWeightsError, match=why) as raised:
            first.shares([first.word, WholeReading(source).word])
        assert "rank 1" in str(raised.value)
