"""How a trainer describes a plain tensor that is a part of a larger one."""

from dataclasses import dataclass


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
