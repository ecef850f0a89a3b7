"""A plan, as it is given to people and machines. JSON of it is the answer of `refitd plan --json`."""

from collections.abc import Mapping
from dataclasses import dataclass

from refitd_client.ways import Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportOption:
    """One transport.

    `hinders`: why it cannot be used, None where it can. `costs_ms`: what one version cost where it was measured.
    """

    transport: Transport
    chosen: bool
    hinders: str | None
    costs_ms: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedProcess:
    """One process on one GPU. Sizes are in GiB; `parts` sums up to `total`."""

    process: str
    role: str
    gpu: int
    total: float
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedChange:
    """One change to a setting, and the GiB that it saves over all processes, after those before it."""

    setting: str
    value: object
    saves: float
    costs: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMemory:
    """The memory of each process at its peak.

    `changes` make it fit, in order: none where it fits, None where no set of them does. `after` is what each process
    takes with them. `kv_tokens` is what an engine's KV cache holds, `kv_wanted` what all its requests need at their
    longest: where that is more, some wait. `host` is what a root in host memory (tmpfs) takes, in GiB; it counts in
    `fits` and `faults` where `host_has` says what there is.
    """

    fits: bool
    faults: tuple[str, ...]
    processes: tuple[PlannedProcess, ...]
    changes: tuple[PlannedChange, ...] | None
    after: tuple[PlannedProcess, ...]
    kv_tokens: int
    kv_wanted: int
    host: float
    host_has: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How weights go, whether everything fits, and what to set.

    `costs_of` says what the costs of all `ways` were measured on, and how a version of this job compares.
    `memory` is None where no model was given. `advice` is what the job has to keep to and no variable says.
    """

    allocation: str
    transport: Transport
    reason: str
    ways: tuple[TransportOption, ...]
    costs_of: str
    memory: PlannedMemory | None
    environment: Mapping[str, Mapping[str, str]]
    advice: tuple[str, ...]
    assumptions: tuple[str, ...]
