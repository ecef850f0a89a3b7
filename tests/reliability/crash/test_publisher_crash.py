"""Whatever stops a publication, and wherever: the version is there, complete and synced, or it is not there."""

import errno
import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refitd_client import NoSpaceError, PublishOptions, RefitError, StorageError, WeightPublisher
from refitd_client.files import durable
from support import durable_effects, published


def test_every_effect_is_enumerated() -> None:
    """A function added to durable.py takes part in the crash tests below."""
    functions = {name for name, value in vars(durable).items() if inspect.isfunction(value)}
    assert functions == {*durable_effects.LEAVES, *durable_effects.COMPOUNDS}


@pytest.mark.parametrize("into", ["new files", "slot"])
def test_kill_9_at_every_file_system_step_leaves_a_whole_version_or_none(tmp_path: Path, into: str) -> None:
    """And the next publisher publishes the step, under a name that nobody has heard of."""
    base = durable_effects.make_base(tmp_path / "base")
    roots = tmp_path / "roots"
    roots.mkdir()
    script = Path(durable_effects.__file__)
    subprocess.run([sys.executable, "-W", "ignore", script, roots, base, into], check=True)
    *killed, through = sorted(roots.iterdir())
    seen = [_versions_after_a_kill(root / "run") for root in killed]
    assert published.versions(through / "run") == ["v000001", "v000002"]
    assert {len(versions) for versions in seen} == {1, 2}
    for root in killed:
        _restart(root, base)


def _versions_after_a_kill(run: Path) -> list[str]:
    versions = published.versions(run)
    for version in versions:
        step = published.check(run / version).step
        _assert_weights(run / version, step)
    assert "v000001" in versions
    return versions


def _restart(root: Path, base: Path) -> None:
    before = published.versions(root / "run")
    durable_effects.publish(root, 2, base)
    (new,) = set(published.versions(root / "run")) - set(before)
    published.check(root / "run" / new)
    _assert_weights(root / "run" / new, 2)


def _assert_weights(folder: Path, step: int) -> None:
    got, expected = published.tensors(folder), durable_effects.weights(step)
    assert got.keys() == expected.keys()
    assert all(np.array_equal(got[name], expected[name]) for name in expected)


Faults = list[tuple[str, Exception]]


def _fail_at_each_effect(
    tmp_path: Path, fault: Callable[[], BaseException], *, recycle: bool = False
) -> list[BaseException]:
    """Publish step 1, then step 2 with a fault at each of its effects in turn, each in a root of its own."""
    tmp_path.mkdir(exist_ok=True)
    base = durable_effects.make_base(tmp_path / "base")
    raised: list[BaseException] = []
    for number in range(1, 200):
        with WeightPublisher(
            tmp_path / f"{number:03d}", "run", options=PublishOptions(base_model=base, max_shard_bytes=256)
        ) as publisher:
            publisher.publish(durable_effects.weights(1), step=1)
            if recycle:
                durable_effects.make_slot(tmp_path / f"{number:03d}")
            named: list[str] = []
            error = _publish_with_fault(publisher, number, fault, named)
            if error is None:
                return raised
            raised.append(error)
            run = tmp_path / f"{number:03d}" / "run"
            assert published.versions(run) == ["v000001"], error
            assert published.leftovers(run) == [], error
            path = publisher.publish(durable_effects.weights(2), step=2).path
            assert path.name == ("v000002.g2" if "v000002" in named else "v000002"), "an id that was seen is used again"
            _assert_weights(path, published.check(path).step)
    raise AssertionError("the publication never came through")


def _publish_with_fault(
    publisher: WeightPublisher, number: int, fault: Callable[[], BaseException], named: list[str]
) -> BaseException | None:
    """`named` gets the names that anything was given before the fault."""

    def act(count: int, name: str, _: object, args: tuple[Any, ...]) -> None:
        if count == number:
            raise fault()
        if name == "rename" and count < number:
            named.append(args[1].name)

    originals = durable_effects.on_each_effect(act)
    try:
        publisher.publish(durable_effects.weights(2), step=2)
    except (RefitError, KeyboardInterrupt) as error:
        return error
    finally:
        durable_effects.restore(originals)
    return None


@pytest.mark.parametrize("recycle", [False, True])
def test_an_io_error_at_every_step_leaves_nothing_and_the_step_can_be_published_again(
    tmp_path: Path, recycle: bool
) -> None:
    """EIO, also of the last sync, when the version had its name for a moment."""
    raised = _fail_at_each_effect(tmp_path, lambda: OSError(errno.EIO, os.strerror(errno.EIO)), recycle=recycle)
    assert all(type(error) is StorageError and "Input/output error" in str(error) for error in raised)
    assert len(raised) > 20


def test_a_full_disk_at_every_step_leaves_nothing_and_says_how_much_is_needed(tmp_path: Path) -> None:
    """ENOSPC; once there is room again, the same publisher publishes the same step."""
    raised = _fail_at_each_effect(tmp_path, lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    for error in raised:
        assert isinstance(error, NoSpaceError)
        assert error.needed > 384
        assert f"needs {error.needed} bytes" in str(error)


def test_ctrl_c_at_every_step_leaves_nothing(tmp_path: Path) -> None:
    """KeyboardInterrupt comes out as it is."""
    for recycle in (False, True):
        raised = _fail_at_each_effect(tmp_path / str(recycle), KeyboardInterrupt, recycle=recycle)
        assert {type(error) for error in raised} == {KeyboardInterrupt}


def test_nothing_gets_its_name_before_everything_in_it_is_synced(tmp_path: Path) -> None:
    """The order that a power cut needs: every file synced after its last write, then the folder, then the rename."""
    base = durable_effects.make_base(tmp_path / "base")
    dirty: dict[str, str] = {}
    named: list[str] = []

    def act(_: int, name: str, __: Callable[..., Any], args: tuple[Any, ...]) -> None:
        match name:
            case "create" | "make_folder" | "remove_file":
                dirty[str(args[0].parent)] = name
            case "write" | "write_at":
                dirty[_path_of(args[0])] = name
            case "overwrite":
                dirty[_path_of(args[0].fd)] = name
            case "sync":
                dirty.pop(_path_of(args[0]), None)
            case "sync_folder":
                dirty.pop(str(args[0]), None)
            case "rename":
                old, new = map(str, args)
                assert not [path for path in dirty if path == old or path.startswith(f"{old}/")], (dirty, new)
                named.append(new)
                dirty[str(args[0].parent)] = dirty[str(args[1].parent)] = name

    originals = durable_effects.on_each_effect(act)
    try:
        durable_effects.publish(tmp_path / "root", 7, base)
    finally:
        durable_effects.restore(originals)
    run = tmp_path / "root" / "run"
    assert named == [str(run / ".publisher.json"), str(run / "v000007")]
    assert not dirty, "something was left unsynced"


def _path_of(fd: int) -> str:
    return str(Path(f"/proc/self/fd/{fd}").readlink())
