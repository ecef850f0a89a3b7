"""Fp8 in blocks in a real SGLang with the plugin, on a CPU or a GPU: an updated server is one that was started anew."""

import shutil
from pathlib import Path

from safetensors.torch import load_file

from refitd_client import PublishOptions, WeightPublisher
from refitd_client.contract.naming import MANIFEST_NAME
from refitd_client.contract.plugin import UpdateOutcome
from support.architectures import change, make
from support.forged import write_delta
from support.plugged import PluggedSglang
from support.sockets import ask

RUN, SHARD = "in/fp8", "model-00001-of-00001.safetensors"
A, B, CHANGED, DELTA, PLAIN, AS_IT_IS = 1, 2, 3, 4, 5, 6
WIDTH = 512  # stacked projections have to be whole blocks of 128

Held = tuple[str, list[int]]  # SGLang's own checksum, and what it answers


def version(root: Path, step: int) -> Path:
    return root / RUN / f"v{step:06d}"


def publish_all(folder: Path, architecture: str) -> Path:
    """Two models in fp8, the first with some elements changed, also as a delta; the first in bf16; B from its files."""
    trained, root = folder / "trained", folder / "root"
    (root / ".refitd").mkdir(parents=True)
    for step in (A, B):
        make(trained / str(step), architecture, step, folder, WIDTH)
    change(trained / str(A), trained / str(CHANGED), 3)
    with WeightPublisher(
        root, RUN, options=PublishOptions(base_model=trained / str(A), dtype="fp8_block")
    ) as publisher:
        for step in (A, B, CHANGED):
            publisher.publish(load_file(trained / str(step) / "model.safetensors"), step=step)
    write_delta(version(root, DELTA), RUN, DELTA, A, *(load_file(version(root, step) / SHARD) for step in (A, CHANGED)))
    with WeightPublisher(root, RUN) as publisher:
        publisher.publish(trained / str(A), step=PLAIN)
        publisher.publish(plain_files(root, B, folder / "checkpoint"), step=AS_IT_IS)
    return root


def plain_files(root: Path, step: int, folder: Path) -> Path:
    """A version's files, which are no version any more: loads of them are SGLang's own."""
    return Path(shutil.copytree(version(root, step), folder / "model", ignore=shutil.ignore_patterns(MANIFEST_NAME)))


def started(root: Path, step: int, folder: Path, *, updated: bool = False) -> PluggedSglang:
    """A server on a version's files."""
    plain_files(root, step, folder)
    flags, variables = ["--skip-tokenizer-init"], {"TORCHDYNAMO_DISABLE": "1", "FP8": "1"}
    return PluggedSglang(folder, folder / "model", *flags, root=root if updated else None, **variables)


def held(server: PluggedSglang) -> Held:
    return server.checksum, server.generate()


def check_an_updated_server_is_one_that_was_started_on_those_files(folder: Path, architecture: str = "qwen3") -> None:
    """By the loader, by replays, by a delta, by what is put back when a load fails, and by SGLang's own reload.

    A checkpoint that is in fp8 already is published as it is, and is the same as the version that was quantised.
    """
    root, expected = publish_all(folder, architecture), dict[int, Held]()
    with started(root, B, folder / str(B)) as server:
        expected[B] = held(server)
    changed = plain_files(root, CHANGED, folder / str(CHANGED))
    with started(root, A, folder / str(A), updated=True) as server:
        expected[A] = held(server)
        assert server.load(changed)[0]
        expected[DELTA] = held(server)
        assert len({str(each) for each in expected.values()}) == len(expected)
        expected[AS_IT_IS] = expected[B]
        updates = ((A, "load"), (B, "replay"), (A, "replay"), (DELTA, "delta"), (B, "replay"), (A, "replay"))
        for step, how in (*updates, (AS_IT_IS, "replay")):
            answer = server.update(version(root, step))
            assert (answer.outcome, answer.how, held(server)) == (UpdateOutcome.SERVED, how, expected[step]), answer
        plan = ask(server.sockets[0], do="hello")["plan"]
        assert (plan["replays"], plan["proven"], plan["loader"]) == (True, True, 0)
        server.fail("copy 5")
        assert server.update(version(root, A)).outcome is UpdateOutcome.RESTORED
        assert held(server) == expected[B]
        refused = server.update(version(root, PLAIN))
        assert (refused.outcome, "dtype='fp8_block'" in refused.reason) == (UpdateOutcome.REFUSED, True), refused
        assert held(server) == expected[B]
        for step in (A, B):
            assert server.load(folder / str(step) / "model")[0]
            assert held(server) == expected[step]
