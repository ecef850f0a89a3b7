"""A version of which a rank has received only what its load plan copies, and what it refuses to do with it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event

import pytest
import torch
from safetensors.torch import save_file

from refitd_client.contract.plugin import UpdateOutcome
from refitd_client.fingerprint import fingerprints
from refitd_client.transport import exporter
from refitd_client.transport.needs import read_needs
from refitd_client.transport.offer import GroupTransfer
from refitd_client.transport.offer_file import ExportedTensors, make_secret, read_secret
from refitd_plugin.memory.source import SourceRefusedError
from support.exporting import offer_of, shared
from support.mini_sglang import tiny_weights
from support.tiny_rank import Rank, group, together, version

ME = "0-1-ab.sock"


@dataclass
class Received:
    """A receiver that has received: it names the offer of what has arrived."""

    name: str
    offer: str
    needs: list[str]

    def receive(self, root: Path, offer: str, stop: Event, needs: str = "") -> str:
        self.needs.append(needs)
        return self.offer


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "root" / ".refitd").mkdir(parents=True)
    make_secret(tmp_path / "root")
    yield tmp_path / "root"
    exporter.end(tmp_path / "root" / "run")


@pytest.fixture
def rank(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rank:
    """Rank 1 of a group of its own, which has learned and proven how it loads; rank 0 does nothing here."""
    startup = tmp_path / "startup"
    startup.mkdir()
    save_file(tiny_weights(0), startup / "model.safetensors")
    members = group(startup, monkeypatch)
    for step in (1, 2):
        together(members, version(root, step))
    return members[1]


class Job:
    """An offer of the weights of seed 5 to be received in part, and the part that has arrived: all else is junk."""

    def __init__(self, root: Path, rank: Rank, digest: str | None = None) -> None:
        preparing = rank.engine.preparing
        preparing.receiver = Received(ME, "", [])
        needs = read_needs(root, ME, preparing.needs(root))
        self.root, self.rank = root, rank
        self.memory = shared(tiny_weights(5), root)
        self.whole = offer_of("run~v000005", self.memory.tensors)
        for name, tensor in self.memory.tensors.items():
            flat, keep = tensor.reshape(-1).view(torch.uint8), torch.zeros(tensor.nbytes, dtype=torch.bool)
            for each in needs.tensors[name].strips:
                for row in range(each.rows):
                    keep[each.begin + row * each.pitch : each.begin + row * each.pitch + each.width] = True
            flat[~keep] = 0x7F
        named: str = preparing.needs(root) if digest is None else digest
        transfer = GroupTransfer(
            name="t", backend="gloo", host="h", port=1, receivers=(ME,), senders=2, needs={ME: named}
        )
        secret = read_secret(root)
        self.announced = ExportedTensors(root / "run", replace(self.whole, transfer=transfer), secret)
        self.arrived = ExportedTensors(root / "run", self.whole, secret)
        preparing.receiver.offer = f"run/{self.arrived.path.name}"

    def prepare(self) -> None:
        self.rank.engine.prepare(f"{self.root}/run/v000005", offer=f"run/{self.announced.path.name}")

    def close(self) -> None:
        for each in (self.announced, self.arrived):
            each.take_back(0.0)
        self.memory.close()


def alone(rank: Rank) -> Rank:
    """As if it were an engine by itself: there is no other rank to agree with."""
    rank.engine._ranks.size = 1
    return rank


@pytest.fixture
def job(root: Path, rank: Rank) -> Iterator[Job]:
    made = Job(root, alone(rank))
    yield made
    made.close()


def test_what_was_received_in_part_is_loaded_along_the_plan(job: Job) -> None:
    assert fingerprints(job.memory.tensors.values()) != list(job.whole.fingerprints)  # there is junk
    job.prepare()
    assert job.rank.engine.preparing.receiver.needs == [job.rank.engine.preparing.needs(job.root)]
    answer = job.rank.answer(job.root / "run" / "v000005")
    assert (answer.outcome, answer.how) == (UpdateOutcome.SERVED, "replay")
    assert job.rank.holds(5)


def test_what_was_received_in_part_is_not_loaded_by_another_plan(job: Job) -> None:
    """Without its plan the loader would read all of each tensor."""
    job.prepare()
    job.rank.engine.loading.plan = None
    answer = job.rank.answer(job.root / "run" / "v000005")
    assert (answer.outcome, "another way to load" in answer.reason) == (UpdateOutcome.REFUSED, True)
    assert job.rank.holds(2)


def test_a_rank_that_needs_other_parts_than_are_sent_refuses_before_it_receives(root: Path, rank: Rank) -> None:
    job = Job(root, rank, digest="0" * 32)
    with pytest.raises(SourceRefusedError, match="needs other parts of the tensors"):
        job.prepare()
    assert rank.engine.preparing.receiver.needs == []
    job.close()


def test_a_rank_to_which_shards_are_not_sent_says_so(job: Job) -> None:
    job.rank.engine.preparing.receiver.name = "another"
    with pytest.raises(SourceRefusedError, match="each rank of the trainer has a part of it"):
        job.prepare()
