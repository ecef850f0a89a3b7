"""A trainer of SGLang's, as slime, miles and NeMo-RL are: the calls that it makes to its engine's address."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import torch
from safetensors.torch import load_file

from .areal_trainer import TrainerRank, announced, named, trainer_rank
from .jobs import PATIENCE

GROUP = "slime-pp_0"
Tensors = Mapping[str, Any]


def tensors_of(model: Path) -> dict[str, Any]:
    """What a trainer has of a model, in the order of its files."""
    return {name: each for path in sorted(model.glob("*.safetensors")) for name, each in load_file(path).items()}


class SglangTrainer:
    """Its calls, and the process that broadcasts. A refusal is returned as its sentence, success as an empty text."""

    def __init__(self, url: str, rank: TrainerRank) -> None:
        self.rank = rank
        self._http = httpx.Client(base_url=url, timeout=3 * PATIENCE, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def post(self, path: str, **body: Any) -> str:
        reply = self._http.post(f"/{path}", json=body)
        if reply.status_code == 200:
            assert reply.json().get("success", True) is True, reply.text
            return ""
        assert (reply.status_code, reply.json().get("success", False)) == (400, False), reply.text
        return reply.json()["message"]

    def connect(self, ranks: int = 1) -> str:
        """Make the group of the trainer and its engines' ranks."""
        assert self.post("destroy_weights_update_group", group_name=GROUP) == ""  # as miles does each time
        self.rank.make(ranks, GROUP)
        said = self.post("init_weights_update_group", **announced(self.rank.port, 1, ranks, GROUP))
        assert said or self.rank.done() == ""
        return said

    def pause(self, mode: str = "abort") -> None:
        """Hold generation, and flush."""
        assert self.post("pause_generation", mode=mode) == ""
        assert self._http.get("/flush_cache").status_code == 200

    def broadcast(self, tensors: Tensors, label: str | None = None, said: Tensors | None = None, most: int = 5) -> str:
        """Send tensors in buckets of so many, as far as they are taken; the first refusal.

        Args:
            said: what the calls say of the tensors where that is not what is sent.
        """
        for names in _in_turn(list(tensors), most):
            self.rank.send({name: tensors[name] for name in names})
            told = tensors if said is None else said
            if refused := self.announce({name: told[name] for name in names}, label):
                return refused
            assert self.rank.done() == ""
        return ""

    def announce(self, bucket: Tensors, label: str | None = None, **more: str) -> str:
        """The call of a bucket, which is answered when that has arrived."""
        body = named(bucket, GROUP) | {"flush_cache": False, **more}
        return self.post("update_weights_from_distributed", **body, weight_version=label)

    def broadcast_flat(self, tensors: Tensors, label: str | None = None, most: int = 5) -> str:
        """The same as SGLang's `FlattenedTensorBucket`: the bytes of a bucket's tensors are one tensor."""
        for names in _in_turn(list(tensors), most):
            bucket = {name: tensors[name] for name in names}
            self.rank.send({"": torch.cat([each.reshape(-1).view(torch.uint8) for each in bucket.values()])})
            if refused := self.announce(bucket, label, load_format="flattened_bucket"):
                return refused
            assert self.rank.done() == ""
        return ""

    def as_slime(self, tensors: Tensors, label: str | None = None, said: Tensors | None = None) -> str:
        """One whole update: pause, buckets, go on. Like slime it goes no further after a refusal."""
        self.pause()
        return self.broadcast(tensors, label, said) or self.post("continue_generation")

    def as_miles(self, tensors: Tensors, label: str | None = None, said: Tensors | None = None) -> str:
        """The same with a session around the buckets."""
        self.pause("retract")
        return (
            self.post("begin_weight_update", selector="all")
            or self.broadcast(tensors, label, said)
            or self.post("end_weight_update")
            or self.post("continue_generation")
        )

    def as_sglang(self, tensors: Tensors, label: str | None = None) -> str:
        """SGLang's own session, with flat buckets and without a pause."""
        return self.post("begin_weight_update") or self.broadcast_flat(tensors, label) or self.post("end_weight_update")

    def by_disk(self, folder: Path, label: str | None = None) -> str:
        """slime's way with `--update-weight-transport disk`."""
        self.pause()
        said = self.post("update_weights_from_disk", model_path=str(folder), weight_version=label)
        return said or self.post("continue_generation")

    def by_pull(self, source: Path, number: int) -> str:
        """slime's and miles' way with deltas, or full versions on a shared folder: pull, then pause and load."""
        local = {"local_checkpoint_dir": "/local/checkpoint", "source_dir": str(source), "target_version": number}
        return self.post("pull_weights", **local) or self.by_disk(Path("/local/checkpoint"), str(number))

    @property
    def generates(self) -> bool:
        """Whether a request gets through now."""
        body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 1}}
        return self._http.post("/generate", json=body).status_code == 200


def _in_turn(names: list[str], most: int) -> Iterator[list[str]]:
    for begin in range(0, len(names), most):
        yield names[begin : begin + most]


@contextmanager
def sglang_trainer(url: str) -> Iterator[SglangTrainer]:
    """A trainer whose process is killed at the end."""
    with trainer_rank() as rank, SglangTrainer(url, rank) as trainer:
        yield trainer
