"""A wall clock that is a day off, and files whose times are: order, ages and time-outs are as if it were right."""

import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from faults import shifted
from faults.stand import Stand, Subject, standing, until
from refitd_client.contract.states import EngineState, VersionState
from support.jobs import RUN
from support.proxy import Proxy

DAY = 86_400.0


def made_of(stand: Stand, model: Path, step: int, age: float) -> None:
    """A checkpoint as a plain script writes it, with files that were last changed `age` seconds ago."""
    folder = stand.root / RUN / f"v{step:06d}"
    shutil.copytree(model, folder)
    for path in folder.iterdir():
        os.utime(path, (time.time() - age, time.time() - age))


def test_a_clock_a_day_off_changes_neither_order_nor_ages_nor_time_outs(engine: Subject, tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    clock.write_text("0")
    by = (sys.executable, shifted.__file__, str(clock))
    flags = ("--keep-last", "1")
    with Proxy(engine.server.port) as proxy, standing(tmp_path, engine, *flags, engines=[proxy.url], by=by) as stand:
        stand.serve(engine.model(1), 1)
        begun = stand.root / RUN / ".incoming-living"  # without a lock, as another trainer may write it
        begun.mkdir()
        (begun / "model.safetensors").write_bytes(b"half of it")
        bad = stand.root / "bad"
        bad.mkdir()
        weights = load_file(engine.models[1] / "model.safetensors")
        save_file(weights | {"model.norm.weight": np.full(32, np.nan, np.float32)}, bad / "model.safetensors")
        assert "norm" in stand.rejected(bad, 2)
        for step, days in ((3, 1), (4, -1), (5, 30), (6, 0)):
            clock.write_text(str(days * DAY))
            stand.serve(engine.model(step), step)
            assert engine.serves(step)
            stand.client.reclaim()
        assert begun.exists(), "what is being written just now counts as a day old"
        assert stand.state_of(2) is VersionState.REJECTED
        assert bad.exists(), "evidence is kept for a day, and a day has not passed"
        versions = stand.client.versions(run=RUN).items
        assert [version.step for version in versions] == sorted((v.step for v in versions), reverse=True)
        proxy.down()
        stand.until_engine(EngineState.UNREACHABLE)
        clock.write_text(str(DAY))
        stand.client.reclaim()
        assert stand.state_of(6) is VersionState.SEALED
        proxy.up()
        stand.serve(engine.model(7), 7)
        stamps = {event.at[:10] for event in stand.events}
        assert len(stamps) >= 3, f"the clock was not wrong: {stamps}"


def test_files_whose_times_are_a_day_off_settle_like_others(engine: Subject, tmp_path: Path) -> None:
    with standing(tmp_path, engine) as stand:
        (stand.root / RUN).mkdir(parents=True)
        for step, age in ((1, DAY), (2, -DAY), (3, 30 * 365 * DAY)):
            made_of(stand, engine.model(step), step, age)
            stand.is_served(step)
            assert engine.serves(step)
        until(lambda: stand.engine_now.state is EngineState.IN_SYNC)
