"""Which transport a publication takes, and why another cannot work. Pure: from what is there, and not from counts.

A GPU is known by its UUID. Bus ids are no names: some hosts give two GPUs one.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from refitd_client.contract.receivers import Receiver, Receivers

Transport = Literal["auto", "disk", "delta", "handover", "nccl", "gloo"]
TRANSPORTS: tuple[str, ...] = get_args(Transport)
_OTHERS_NAMED = 3  # engines in a sentence
_OWN_MEMORY = "the tensors are in this process's memory: put them into SharedTensors (docs/handover.md), or use gloo"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerPlace:
    """Where the trainer's tensors are.

    `host` and `boot` name the host. `devices` are the UUIDs of the GPUs that hold tensors, empty for host memory;
    `shared`: that host memory can be opened by other processes. `backends` are those of this process's torch.
    """

    host: str
    boot: str
    devices: frozenset[str]
    shared: bool
    backends: frozenset[str]

    def is_host_of(self, receiver: Receiver) -> bool:
        """Whether a rank runs on the same host, in a container of the same name."""
        return (receiver.host, receiver.boot) == (self.host, self.boot)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The transport that a publication takes, and why, as a sentence."""

    transport: Transport
    why: str


def choose(trainer: TrainerPlace, found: Receivers) -> Choice:
    """The fastest transport that can reach all ranks, by the figures of docs/transports.md.

    Args:
        trainer: where the tensors are.
        found: what can receive, as the service says.
    """
    if (hindrance := hinders("handover", trainer, found)) is None:
        where = "share a GPU" if trainer.devices else "share a host"
        return Choice(transport="handover", why=f"trainer and engines {where}")
    if (no_nccl := hinders("nccl", trainer, found)) is None:
        return Choice(transport="nccl", why="trainer and engine ranks have GPUs of their own")
    why = f"no hand-over: {hindrance}; no NCCL: {no_nccl}" if found.receivers else hindrance
    return Choice(transport="delta", why=f"files go everywhere ({why})")


def hinders(transport: Transport, trainer: TrainerPlace, found: Receivers) -> str | None:
    """Why a transport cannot work, as a sentence that says what else to do; None where it can.

    Args:
        transport: the transport.
        trainer: where the tensors are.
        found: as in `choose`.
    """
    if transport not in {"handover", "nccl", "gloo"}:
        return None
    receivers = found.receivers
    if not receivers:
        return _none_receives(found)
    if transport == "handover":
        return _hinders_handover(trainer, receivers)
    return _hinders_group(transport, trainer, receivers) or (
        _hinders_nccl(trainer, receivers) if transport == "nccl" else None
    )


def why_files_alone(trainer: TrainerPlace, found: Receivers) -> str | None:
    """Why a forced hand-over would bring nothing but files, whatever hosts and GPUs there are; None where it may work.

    Args:
        trainer: where the tensors are.
        found: as in `choose`.
    """
    if not found.receivers:
        return _none_receives(found)
    return None if trainer.devices or trainer.shared else _OWN_MEMORY


def _none_receives(found: Receivers) -> str:
    others = found.others
    if not others:
        return (
            "no engine of the service follows the run yet: one that follows no run does so from the first version on, "
            "and of one that follows another 'refitd explain RUN' says how to bring it here"
        )
    more = len(others) - _OTHERS_NAMED
    names = ", ".join(others[:_OTHERS_NAMED]) + (f" and {more} more" if more > 0 else "")
    return f"no engine of the run ({names}) has refitd inside: install it there (docs/plugin.md)"


def _without_backend(backend: str) -> str:
    return f"the trainer's torch has no {backend}: {_other(backend)}"


def _other(backend: str) -> str:
    return "use gloo, or auto" if backend == "nccl" else "use auto"


def _hinders_handover(trainer: TrainerPlace, receivers: Sequence[Receiver]) -> str | None:
    if (far := next((each for each in receivers if not trainer.is_host_of(each)), None)) is not None:
        return f"rank {far.rank} of {far.engine} runs on {far.host}, and the trainer on {trainer.host}"
    if not trainer.devices and not trainer.shared:
        return _OWN_MEMORY
    other = next((each for each in receivers if trainer.devices and each.device not in trainer.devices), None)
    if other is not None:
        return f"rank {other.rank} of {other.engine} is on {other.device or 'no GPU'}, and the tensors are not there"
    return None


def _hinders_group(backend: str, trainer: TrainerPlace, receivers: Sequence[Receiver]) -> str | None:
    if backend not in trainer.backends:
        return _without_backend(backend)
    lacks = next((each for each in receivers if backend not in each.backends), None)
    return None if lacks is None else f"rank {lacks.rank} of {lacks.engine} has no {backend}: {_other(backend)}"


def _hinders_nccl(trainer: TrainerPlace, receivers: Sequence[Receiver]) -> str | None:
    if not trainer.devices:
        return "the tensors are in host memory: use gloo"
    if len(trainer.devices) > 1:
        return f"the tensors are on {len(trainer.devices)} GPUs, and one sends"
    both = next((each for each in receivers if each.device in trainer.devices), None)
    if both is not None:
        return (
            f"trainer and rank {both.rank} of {both.engine} share {both.device}: NCCL refuses two ranks on one GPU; "
            "use handover"
        )
    twice = next((device for device, count in Counter(each.device for each in receivers).items() if count > 1), None)
    return None if twice is None else f"two engine ranks share {twice}: NCCL refuses two ranks on one GPU; use disk"
