"""The protocol between the service and the plugin in an engine's process: sockets, lines, messages.

Each rank of an engine listens on `<root>/.refitd/engines/<rank>-<pid>-<random>.sock`. One line of JSON is one request,
one line its reply. docs/plugin.md describes both in full.

The plugin's reply to an update (`Answer`) is a sentence for people, and the same for programs behind it:

    Refused, the weights are what they were: … refitd-plugin={"protocol":1,"outcome":"refused",…}

SGLang adds to a message (" Weight version updated to 7.") and joins those of data-parallel ranks (" | "), so the JSON
is found by its mark and read to its own end. The plugin writes answers, the service reads them.

The service names to a trainer those ranks that can receive weights over a process group (`Receivers`).
"""

import json
import re
import struct
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import StrEnum
from typing import Any, Literal

import msgspec

PROTOCOL = 1
"""The version of the protocol, of answers too. It changes when readers have to change."""

ASIDE = "the plugin stands aside"
"""How a service begins its reason for loads of the server's own, where refitd is inside the engine all the same."""

ENGINES_FOLDER = "engines"
MAX_LINE = 64 * 2**10  # bytes
_SOCKET = re.compile(r"\d+-\d+-[0-9a-f]+\.sock")
_FAULT = re.compile(rf"(?:{ASIDE}|rank \d+ says): (REFITD_.*)", re.DOTALL)
VARIABLES = ("ROOT", "WAIT", "PROVE")
"""What follows the name of a hook and `_` in the names of its variables."""
HOOKS = ("REFITD_SGLANG", "REFITD_VLLM")
_VARIABLE = re.compile(f"({'|'.join(HOOKS)})_([A-Z_]+)")


def setting_fault(stock_reason: str | None) -> str | None:
    """Which of refitd's variables inside an engine is wrong; None if nothing says that one is."""
    told = _FAULT.search(stock_reason or "")
    return None if told is None else told[1]


def variable_meant(name: str) -> str | None:
    """The variable of a hook that was probably meant by one that it does not have; None for all other names."""
    found = _VARIABLE.fullmatch(name)
    if found is None or found[2] in VARIABLES:
        return None
    return next((f"{found[1]}_{near}" for near in get_close_matches(found[2], VARIABLES, 1)), None)


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """A service: `service` is a random name that its state folder keeps, so that a restart leaves it the same.

    The services of a group have one name, which their database keeps. `epoch` grows with each takeover among them; it
    is 0 for a service alone.
    """

    service: str
    root: str
    host: str
    pid: int
    epoch: int = 0


class PluginRequest(msgspec.Struct, forbid_unknown_fields=True):
    """One line of the service. `path` is relative to the root, and so is `offer`, the file of an offer of the version
    that will be at `path`; the `allow_…` are what the notice allows. With `prove` the rank reads its share of a full
    version's tensors and answers with a `TensorProof`. `owner` leads for `seconds`. `peer` is the pid of the process
    that sent it, from the kernel and not from the line (0 if it is of another PID namespace).
    """

    do: Literal["hello", "prepare", "contents", "forget", "lead"]
    path: str = ""
    offer: str = ""
    allow_missing: tuple[str, ...] = ()
    allow_extra: bool = False
    allow_dtype_cast: bool = False
    check: Literal["bytes", "headers"] | None = None
    prove: bool = False
    owner: Owner | None = None
    seconds: float = 0.0
    peer: int = 0


class LoadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The rank's load plan: whether copies can stand for a load, and how many tensors go through the engine's loader.
    `reason` says why nothing can be replayed.
    """

    replays: bool
    loader: int = 0
    reason: str = ""


class Handshake(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the reply to `hello` that the service reads. `rank` of `ranks` is tensor-parallel.

    `host`, `port` and `seed` identify its server: the host's name, and two of the server's own launch settings.
    `boot` (the kernel's id of the boot) and `device` (the UUID of the rank's GPU, "" for none) say where it is,
    `backends` over which process groups it can receive weights, `needs` the digest of the bytes that it needs of a
    version, "" where it needs all or does not know. `leads`: it supports leases. `proves`: it can read a version's
    tensors with its GPU, and prove them.
    """

    plugin: str
    state: Literal["on", "aside"]
    host: str
    port: int | None
    rank: int
    ranks: int
    sglang: str = ""
    vllm: str = ""
    seed: int | None = None
    dp_rank: int | None = None
    reason: str = ""
    served: str = ""
    kinds: tuple[str, ...] = ()
    boot: str = ""
    device: str = ""
    backends: tuple[str, ...] = ()
    needs: str = ""
    leads: bool = False
    proves: bool = False
    plan: LoadPlan | None = None


class TensorProof(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank found in its share of a version's tensors (`validation/validate.py`).

    `tensors` counts them, `digest` is that of their fingerprints. `fault` says why they are not proved, "" where each
    has the fingerprint of the manifest and only finite values.
    """

    tensors: int = 0
    digest: str = ""
    fault: str = ""


def socket_name(rank: int, pid: int, random: str) -> str:
    """The name of a rank's socket. `random` are hex digits: a process may open more than one."""
    return f"{rank}-{pid}-{random}.sock"


def is_socket_name(name: str) -> bool:
    return _SOCKET.fullmatch(name) is not None


PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid and gid, as SO_PEERCRED gives them
MARK = "refitd-plugin="
MAX_REASON = 600  # characters

NEEDS_FULL = "full"  # a delta was refused, and a full version would be accepted
NEEDS_LEADER = "leader"  # another service leads the engine


class UpdateOutcome(StrEnum):
    """The weights that an update left behind, the best outcome first."""

    SERVED = "served"  # the new version, on every rank
    REFUSED = "refused"  # the old one: nothing was written
    RESTORED = "restored"  # the old one: it was put back, and its fingerprints say so
    UNKNOWN = "unknown"


_SENTENCES = {
    UpdateOutcome.SERVED: "Succeeded to update model weights.",  # SGLang's own: clients may search for it
    UpdateOutcome.REFUSED: "Refused, the weights are what they were",
    UpdateOutcome.RESTORED: "Failed, and the weights of before were put back",
    UpdateOutcome.UNKNOWN: "Failed, and it is not known what the weights are",
}


_OPTIONAL = ("version", "how", "contents", "needs", "proved", "ms")  # what a message leaves out if it is empty


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of one update on one rank. `how`: `replay`, `load` or `delta`; `contents`: digest of the rank's
    fingerprints; `proved`: how many tensors in its memory have the fingerprints of the manifest; times in ms. `needs`:
    what would be accepted instead, `NEEDS_FULL` or `NEEDS_LEADER`, or nothing.
    """

    outcome: UpdateOutcome
    reason: str = ""
    plugin: str = ""
    version: str = ""
    how: str = ""
    contents: str = ""
    needs: str = ""
    proved: int = 0
    ms: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def message(self) -> str:
        sentence, reason = _SENTENCES[self.outcome], _short(self.reason)
        if reason and self.outcome is not UpdateOutcome.SERVED:
            sentence = f"{sentence}: {reason}"
        facts: dict[str, Any] = {"protocol": PROTOCOL, "outcome": self.outcome.value, "plugin": self.plugin}
        optional: dict[str, Any] = {"reason": reason} | {name: getattr(self, name) for name in _OPTIONAL}
        facts |= {name: value for name, value in optional.items() if value}
        return f"{sentence} {MARK}{json.dumps(facts, separators=(',', ':'))}"

    @property
    def log_line(self) -> str:
        stages = ", ".join(f"{stage} {took:.1f}" for stage, took in self.ms.items())
        return f"{self.outcome.value} {self.version} {self.how} [ms: {stages}] {_short(self.reason)}".strip()


def answers_in(message: str) -> list[Answer]:
    """The answers in a reply's message: one for each data-parallel rank, none if there was no plugin.

    One that cannot be read, because it is damaged or of a newer protocol, counts as an unknown outcome: the mark shows
    that a plugin answered, and nothing shows that all is well.
    """
    return [_read(part) for part in message.split(MARK)[1:]]


def _read(text: str) -> Answer:
    try:
        facts, _ = json.JSONDecoder().raw_decode(text)
        if facts["protocol"] != PROTOCOL:
            return Answer(outcome=UpdateOutcome.UNKNOWN, reason=f"the plugin speaks protocol {facts['protocol']!r:.20}")
        words = {key: str(facts.get(key, "")) for key in ("reason", "plugin", "version", "how", "contents", "needs")}
        ms = {str(stage): float(value) for stage, value in facts.get("ms", {}).items()}
        return Answer(outcome=UpdateOutcome(facts["outcome"]), ms=ms, proved=int(facts.get("proved", 0)), **words)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return Answer(outcome=UpdateOutcome.UNKNOWN, reason="the plugin's answer cannot be read")


def _short(reason: str) -> str:
    """On one line, and without a mark of its own: a reason may quote names from outside."""
    line = " ".join(reason.replace(MARK, "").split())
    return line if len(line) <= MAX_REASON else f"{line[: MAX_REASON - 1]}…"


@dataclass(frozen=True, slots=True, kw_only=True)
class Receiver:
    """One rank of an engine with refitd inside.

    `name` is that of its socket, which no other rank ever has. `host` and `boot` (the kernel's id of the boot) say
    where it runs, `device` is the UUID of its GPU, "" where it has none. `backends` are those of its torch (`gloo`,
    `nccl`). `needs` is the digest of what it needs of a version, "" where that is everything or not known.
    """

    engine: str
    rank: int
    name: str
    host: str
    boot: str
    device: str = ""
    backends: list[str] = field(default_factory=list[str])
    needs: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Receivers:
    """All that a run has: those of its engines that answer. `others` are ids of its engines that have none."""

    receivers: list[Receiver]
    others: list[str] = field(default_factory=list[str])
