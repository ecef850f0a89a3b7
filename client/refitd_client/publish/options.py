"""What a publisher is opened with, and how ranks describe their parts.

Which versions get files where engines take them from the trainer's memory (`durable`): all, one of some, or none. A
version without files lasts as long as the engines that hold it. One that restarts goes back to the newest version with
files, and so does a rollback.

    always     files follow each version
    every=N    files follow the first version of a publisher, and then one of N
    never      files are written only where not every engine has taken the version from memory

A version that engines do not all take always gets files, whatever the policy is: nothing else could bring it to them.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import inf
from numbers import Real
from pathlib import Path
from typing import Any, Literal

from refitd_client.write.content import BaseModel
from refitd_client.write.plan import Rename

KEEP = 4
"""How many of the newest versions a publisher keeps in an object store, besides the bases that they need."""

ALWAYS = "always"
NEVER = "never"
_EVERY = re.compile(r"every=([1-9]\d{0,8})")


@dataclass(frozen=True, slots=True)
class DurabilityPolicy:
    """One version of `every` gets files; none where it is None. `text` is how the trainer said it."""

    text: str
    every: int | None

    @classmethod
    def of(cls, text: str) -> "DurabilityPolicy":
        """Read what the trainer says.

        Raises:
            ValueError: it is none of `always`, `never` and `every=N`.
        """
        if text in {ALWAYS, NEVER}:
            return cls(text, 1 if text == ALWAYS else None)
        if (match := _EVERY.fullmatch(text)) is None:
            raise ValueError(f"durable is {text!r}: it is 'always', 'never', or 'every=10' for one version of ten")
        return cls(text, int(match[1]))

    @property
    def is_always(self) -> bool:
        return self.every == 1

    def of_next(self, since: int | None) -> str | None:
        """The policy in words if the next version needs no files where engines take it; None if it gets some.

        Args:
            since: how many versions this publisher has published since the last with files; None before the first.
        """
        gets_files = self.every is not None and (since is None or since + 1 >= self.every)
        return None if gets_files else self.text


ALL = DurabilityPolicy(ALWAYS, 1)


Block = Literal["committed", "staged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaRules:
    """When a delta is worth it.

    `threshold` is the share of all elements that it may list: 0.1 of bf16 takes a third of the full version's bytes.
    Every `anchor_every`th version is full, so that a reader who lost everything has few deltas to go through.
    """

    threshold: float = 0.1
    anchor_every: int = 20

    def __post_init__(self) -> None:
        """Check the numbers. Raises ValueError if `threshold` is not between 0 and 1, or `anchor_every` is below 1."""
        if not 0.0 <= self.threshold <= 1.0:
            raise ValueError(f"threshold is {self.threshold}; it is a share of all elements, from 0 to 1")
        if self.anchor_every < 1:
            raise ValueError(f"anchor_every is {self.anchor_every}; 1 makes every version a full one")

    def most(self, elements: int) -> int:
        """How many of so many elements a delta may list. All checks of the threshold use this number."""
        return int(self.threshold * elements)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishOptions:
    """What a `WeightPublisher` is opened with. The defaults serve most trainers. Ranks are opened with the same.

    Args:
        base_model: a model's folder, whose configuration and tokenizer files go into each version, and whose tensors'
            names decide which names of tied weights are written. A `dtype` for all tensors leaves each in the dtype
            that this model has it in, such as a router's bias in float32.
        token: the bearer token; else `token_file`, `REFITD_TOKEN`, `REFITD_TOKEN_FILE`.
        token_file: holds the token, and is read again for each request.
        max_shard_bytes: tensors are cut into files of at most so many bytes; by default into about 16 files of 64 MB to
            5 GB, which several threads write and digest.
        check_finite: refuse tensors with NaN or infinity. Checkpoints in folders are left to the service to check.
        dtype: publish floating-point tensors in this dtype (`torch.bfloat16`), or by the first matching pattern of a
            mapping (`{"*.router.*": torch.float32, "*": torch.bfloat16}`) from published names to dtypes. With
            `"fp8_block"` linear layers' weights are quantised for engines that serve fp8 in blocks
            (docs/publishing.md); ranks do not. Folders are published as they are, and refused with an option that would
            do nothing to them: `dtype`, `rename`, `fingerprints`, `max_shard_bytes`, `check_finite=False`, `shadow`,
            `durable`, and of an adapter `base_model`.
        rename: published names for the trainer's, as a mapping or a function; None leaves a tensor out. Marks of
            wrappers (`_fsdp_wrapped_module.`, `_orig_mod.`, DDP's `module.`) are taken off before, and a module of
            transformers has the names of its checkpoint by then, as `save_pretrained` would write them.
        fingerprints: have each full version's manifest name the tensors' fingerprints, which engines prove it by. By
            default where GPUs compute them as good as for free: all tensors are on GPUs, and with ranks these copy into
            a slot. Processors do 0.6 GB/s a thread. With deltas they are named in any case; of checkpoints in folders
            never.
        delta_rules: when a delta is worth it, for `transport="delta"`.
        shadow: where the weights published last are kept, for deltas of tensors on a GPU: on the GPU (`gpu`, as much
            memory again), or in host memory, from where they are streamed over the bus (`stream`).
        engines: with `mine` the service brings engines to this run while none follows it: those that follow no run, and
            those of runs that are closed (`RefitClient.close_run`). Engines of a run that is not closed stay there.
            Needs `service_url`.
        keep: how many of the newest versions stay in an object store, besides the bases that they need. In a root the
            service collects.
        durable: which versions that engines take from memory get files: `always`, `every=N` (the first and then one of
            N) or `never` (docs/transports.md). An engine that restarts goes back to the newest with files.
        rank_timeout: seconds that a rank may come later than the others, or take for its part. One that dies is noticed
            at once.
    """

    base_model: str | os.PathLike[str] | None = None
    token: str | None = field(default=None, repr=False)
    token_file: str | os.PathLike[str] | None = None
    max_shard_bytes: int | None = None
    check_finite: bool = True
    dtype: Any = None
    rename: Rename | None = None
    fingerprints: bool | None = None
    delta_rules: DeltaRules = field(default_factory=DeltaRules)
    shadow: Literal["gpu", "stream"] = "stream"
    engines: Literal["mine"] | None = None
    keep: int = KEEP
    durable: str = "always"
    rank_timeout: float = 300.0

    def check(self, service_url: str | None) -> None:
        """Check each option by itself.

        Raises:
            ValueError: one cannot be; the message names it.
        """
        if self.max_shard_bytes is not None and self.max_shard_bytes <= 0:
            raise ValueError(f"max_shard_bytes is {self.max_shard_bytes}; a shard takes at least one byte")
        if self.shadow not in {"gpu", "stream"}:
            raise ValueError(f"shadow is {self.shadow!r}: it is 'gpu' or 'stream'")
        if self.engines not in {None, "mine"}:
            raise ValueError(f"engines is {self.engines!r}: it is 'mine', or None")
        if self.engines is not None and service_url is None:
            raise ValueError("engines='mine' needs the service_url of the service that has the engines")
        if not is_timeout(self.rank_timeout):
            raise ValueError(f"rank_timeout is {self.rank_timeout!r}; it is a positive number of seconds")
        DurabilityPolicy.of(self.durable)

    def given(self) -> Mapping[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def base(self) -> BaseModel | None:
        """The base model.

        Raises:
            PublishError: it is no model's folder.
        """
        return None if self.base_model is None else BaseModel(Path(self.base_model))


@dataclass(frozen=True, slots=True)
class Sharded:
    """A rank's plain tensor is part `index` of `count` along dimension `dim`, split as `torch.chunk` splits.

    `size` is the whole tensor's size along `dim`; without it the parts are of equal size.

    >>> Sharded(dim=0, index=tensor_parallel_rank, count=tensor_parallel_size)
    """

    dim: int
    index: int
    count: int
    size: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"part {self.index} of {self.count}: parts are counted from 0 to count - 1")
        if self.dim < 0 or (self.size is not None and self.size < 0):
            raise ValueError(f"dim {self.dim} and size {self.size}: neither is negative")


def is_timeout(seconds: Any) -> bool:
    return isinstance(seconds, Real) and 0 < float(seconds) < inf
