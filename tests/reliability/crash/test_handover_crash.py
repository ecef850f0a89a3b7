"""Trainer, engine and service are killed while weights are handed over: nothing wrong is served, and nobody waits."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import handover_engine
import handover_trainer
import pytest
from safetensors.torch import save_file

from refitd_client import RefitClient, WeightPublisher
from refitd_client.contract.plugin import Receiver, Receivers
from refitd_client.contract.states import VersionState
from refitd_client.http.publisher_client import ReceiversQuery
from refitd_client.transport import handover
from refitd_client.transport.memory import boot_id, host_name
from refitd_client.transport.offer_file import make_secret
from support.exporting import shared
from support.forked import Forked
from support.mini_sglang import tiny_weights
from support.servers import RefitdServer


class Told:
    """A process that says a line for each that it is told."""

    def __init__(self, main: Callable[[], None], argument: Path) -> None:
        self.process = Forked(main, ["told", str(argument)], dict(os.environ))

    def tell(self, line: str) -> None:
        self.process.stdin.write(f"{line}\n".encode())

    def hear(self) -> str:
        return self.process.stdout.readline().decode().strip()

    def ask(self, line: str) -> str:
        self.tell(line)
        return self.hear()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        self.kill()
        self.process.stdin.close()
        self.process.stdout.close()


Begin = Callable[[Callable[[], None], Path], Told]


@pytest.fixture
def begin() -> Iterator[Begin]:
    with ExitStack() as ends:

        def begin(main: Callable[[], None], argument: Path) -> Told:
            told = Told(main, argument)
            ends.callback(told.end)
            return told

        yield begin


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folder in ("root/.refitd", "root/run", "startup"):
        (tmp_path / folder).mkdir(parents=True)
    make_secret(tmp_path / "root")
    return tmp_path / "root"


@pytest.fixture
def engine(root: Path, begin: Begin) -> Told:
    engine = begin(handover_engine.main, root.parent / "startup")
    assert engine.hear() == "ready"
    return engine


@pytest.fixture
def trainer(root: Path, begin: Begin) -> tuple[Told, str]:
    trainer = begin(handover_trainer.main, root)
    return trainer, trainer.hear()


def prepared(engine: Told, root: Path, offer: str) -> str:
    """Prepares, and says what it is to load."""
    path = str(root / "run" / "v000005")
    assert engine.ask(f"prepare {path} {offer}") == "prepared run~v000005"
    return f"update {path}"


def copying(engine: Told, root: Path, offer: str) -> None:
    """In the middle of its copy."""
    assert engine.ask("slow") == "slow"
    assert engine.ask(prepared(engine, root, offer)) == "copying"


def test_a_trainer_killed_between_offer_and_commit_leaves_the_engine_untouched_and_the_next_one_is_taken(
    root: Path, engine: Told, trainer: tuple[Told, str], begin: Begin
) -> None:
    update = prepared(engine, root, trainer[1])
    trainer[0].kill()
    assert engine.ask(update) == "refused [0]"
    assert engine.ask(f"prepare {root}/run/v000005 {trainer[1]}").startswith("refused the offer was withdrawn, or")
    again = begin(handover_trainer.main, root)
    offer = again.hear()
    assert engine.ask(prepared(engine, root, offer)) == "served [5]"
    assert again.ask("back 0") == "mine"


def test_a_trainer_killed_in_mid_copy_has_the_engine_put_back_what_it_served(
    root: Path, engine: Told, trainer: tuple[Told, str]
) -> None:
    copying(engine, root, trainer[1])
    trainer[0].kill()
    assert engine.ask("go on") == "restored [0]"


def test_an_engine_killed_in_mid_copy_holds_up_no_trainer(root: Path, engine: Told, trainer: tuple[Told, str]) -> None:
    copying(engine, root, trainer[1])
    assert trainer[0].ask("back 0") == "read"
    engine.kill()
    assert trainer[0].ask("back 30") == "mine"


def test_an_engine_that_hangs_in_mid_copy_serves_nothing_of_a_trainer_that_went_on(
    root: Path, engine: Told, trainer: tuple[Told, str]
) -> None:
    copying(engine, root, trainer[1])
    engine.process.send_signal(signal.SIGSTOP)
    assert trainer[0].ask("back 0.1") == "read"
    assert trainer[0].ask("overwrite") == "overwritten"
    engine.process.send_signal(signal.SIGCONT)
    assert engine.ask("go on") == "restored [0]"
    assert trainer[0].ask("back 30") == "mine"


def test_a_service_killed_while_it_has_an_offer_costs_the_trainer_a_wait_and_the_version_comes_by_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, model, weights = tmp_path / "root", tmp_path / "model", shared(tiny_weights(5), tmp_path)
    for folder in (root, model, tmp_path / "service"):
        folder.mkdir()
    save_file(tiny_weights(0), model / "model.safetensors")
    (model / "config.json").write_text("{}")
    monkeypatch.setattr(handover, "ANSWER_SECONDS", 0.5)
    lap = handover.Handover._lap
    with RefitdServer(tmp_path / "service", root, [], "--base-model", str(model)) as service:

        def killing(hand: handover.Handover, name: str) -> None:
            lap(hand, name)
            if name == "notice":
                service.kill()

        here = Receiver(engine="e", rank=0, name="0-1-ab.sock", host=host_name(), boot=boot_id())
        monkeypatch.setattr(ReceiversQuery, "ask", lambda _: Receivers(receivers=[here]))
        monkeypatch.setattr(handover.Handover, "_lap", killing)
        with WeightPublisher(root, "run", service.url) as publisher:
            publication = publisher.publish(weights.tensors, step=1, transport="handover")
            assert publication.handed is not None
            assert (publication.handed.engines, "has taken it" in str(publication.handed.reason)) == ((), True)
            assert not list((root / "run").glob(".offer-*"))
            publication.committed(60)
        service.restart()
        with RefitClient(service.url) as client:
            assert client.wait("run~v000001", "sealed", 30).version.state is VersionState.SEALED
    weights.close()
