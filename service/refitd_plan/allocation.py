"""Who computes on how many GPUs: engines that generate and trainers that train, each with its parallelism.

groups    lie on GPUs of their own, one group after the other ("+" in AReaL's strings)
members   of one group share its GPUs, and have as many ranks as it has GPUs ("|")
"""

from dataclasses import dataclass
from enum import StrEnum

from refitd_client.errors import PlanRefusedError
from refitd_plan.faults import check_positive

MOST_RANKS = 65_536
SGLANG, VLLM = "sglang", "vllm"
ENGINE_NAMES = {SGLANG: "SGLang", VLLM: "vLLM"}
"""The backends that generate, and what people call them."""


class Role(StrEnum):
    """What a component does."""

    GENERATION = "generation"
    TRAINING = "training"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """Sizes of the dimensions. Experts are spread over ranks that are there anyway: `e` and `et` add none.

    `e` is the size of expert parallelism, `et` that of tensor parallelism within an expert.
    """

    d: int = 1
    t: int = 1
    p: int = 1
    c: int = 1
    e: int = 1
    et: int = 1

    @property
    def world(self) -> int:
        """The ranks, and so the GPUs, that it takes."""
        return self.d * self.t * self.p * self.c

    def __str__(self) -> str:
        """As in an allocation string."""
        parts = {"d": self.d, "t": self.t, "p": self.p, "c": self.c, "e": self.e}
        return "".join(f"{letter}{size}" for letter, size in parts.items() if size > 1) or "d1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One part of a job. `name` is what AReaL calls it, None where it has none."""

    backend: str
    role: Role
    parallel: Parallel
    name: str | None = None

    @property
    def title(self) -> str:
        """What to call it."""
        return self.name or self.backend


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The parts of a job and who shares GPUs with whom."""

    text: str
    groups: tuple[tuple[Component, ...], ...]

    def __post_init__(self) -> None:
        """Refuse what leaves nothing to plan.

        Raises:
            PlanRefusedError: there is no engine, no trainer, or there are more ranks than any job has.
        """
        if not self.of(Role.GENERATION):
            raise PlanRefusedError(f"{self.text} names no engine to bring weights to: add one, such as sglang:d1")
        if not self.of(Role.TRAINING):
            raise PlanRefusedError(f"{self.text} names no trainer that makes weights: add one, such as fsdp:d1")
        check_positive(f"the number of ranks of {self.text}", self.world, most=MOST_RANKS)

    @property
    def world(self) -> int:
        """The GPUs that it asks for."""
        return sum(members[0].parallel.world for members in self.groups)

    def of(self, role: Role) -> list[Component]:
        """The components with a role, in order."""
        return [member for members in self.groups for member in members if member.role is role]

    @property
    def engine(self) -> str:
        """The backend that generates; of several the first."""
        return self.of(Role.GENERATION)[0].backend

    @property
    def generation_world(self) -> int:
        """The ranks that generate."""
        return sum(engine.parallel.world for engine in self.of(Role.GENERATION))

    @property
    def colocated(self) -> bool:
        """Whether trainers and engines are to share GPUs."""
        return any({member.role for member in members} == set(Role) for members in self.groups)


def allocation_of_counts(
    engine_gpus: int, trainer_gpus: int, *, engine_tp: int = 1, shared: bool = False
) -> Allocation:
    """An allocation by plain counts.

    Args:
        engine_gpus: GPUs of all engines.
        trainer_gpus: GPUs that FSDP trains on.
        engine_tp: GPUs of one engine.
        shared: whether both get the same GPUs.

    Raises:
        PlanRefusedError: they contradict each other.
    """
    for name, value in (("engine_gpus", engine_gpus), ("trainer_gpus", trainer_gpus), ("engine_tp", engine_tp)):
        check_positive(name, value, most=MOST_RANKS)
    if engine_gpus % engine_tp:
        raise PlanRefusedError(f"{engine_gpus} GPUs cannot be cut into engines of {engine_tp} GPUs each")
    if shared and engine_gpus != trainer_gpus:
        raise PlanRefusedError(f"shared GPUs take as many ranks of both: {engine_gpus} generate, {trainer_gpus} train")
    generation = Parallel(d=engine_gpus // engine_tp, t=engine_tp)
    engine = Component(backend="sglang", role=Role.GENERATION, parallel=generation)
    trainer = Component(backend="fsdp", role=Role.TRAINING, parallel=Parallel(d=trainer_gpus))
    sign = "|" if shared else "+"
    text = f"sglang:{engine.parallel}{sign}fsdp:{trainer.parallel}"
    return Allocation(text=text, groups=((engine, trainer),) if shared else ((engine,), (trainer,)))
