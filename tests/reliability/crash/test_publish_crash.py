"""kill -9 at every file-system step of a publication, seen from the service: it finds the whole version or none."""

import asyncio
import subprocess
import sys
from collections import Counter
from pathlib import Path

from refitd.catalog.catalog import Catalog
from refitd.catalog.examining import References
from refitd.catalog.files import DiskFiles
from refitd.clock import SystemClock
from refitd.policy.admit import CatalogRules
from refitd.state.journal.recovery import open_journal
from refitd.state.store import Store
from refitd_client.contract.naming import SERVICE_FOLDER, parse_version_folder
from refitd_client.contract.states import VersionState
from support import durable_effects

RULES = CatalogRules(scan_interval=0.05, settle_for=0.0, settle_timeout=0.0, allow_dtype_cast=False)


async def judged(root: Path, state: Path, model: Path, count: int) -> dict[int, tuple[VersionState, bool]]:
    """What a fresh service makes of a root when it has judged so many versions: their states, and if they are ours."""
    (root / SERVICE_FOLDER).mkdir()
    journal = open_journal(state, root)
    store = Store(journal, SystemClock())
    catalog = Catalog(store, DiskFiles(root), References(store, model), RULES)
    tasks = [asyncio.create_task(part()) for part in (catalog.run, journal.run)]
    seen = -1
    async with asyncio.timeout(30):
        while len(store.versions) < count or any(version.state.is_open for version in store.versions.values()):
            seen = await store.changed.wait_after(seen)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    journal.close()
    return {version.order.step: (version.state, version.files.owned) for version in store.versions.values()}


def test_a_service_on_what_a_kill_9_of_the_publisher_left_finds_the_whole_version_or_none(tmp_path: Path) -> None:
    """Kill between temporary and rename, and everywhere else."""
    base = durable_effects.make_base(tmp_path / "base")
    durable_effects.publish(tmp_path / "model", 1, base)
    roots = tmp_path / "roots"
    roots.mkdir()
    script = Path(durable_effects.__file__)
    subprocess.run([sys.executable, "-W", "ignore", script, roots, base], check=True)
    seen: Counter[int] = Counter()
    for root in sorted(roots.iterdir()):
        names = sum(parse_version_folder(path.name) is not None for path in (root / "run").iterdir())
        state = tmp_path / "states" / root.name
        found = asyncio.run(judged(root, state, tmp_path / "model" / "run" / "v000001", names))
        whole = dict.fromkeys(range(1, names + 1), (VersionState.SEALED, True))
        assert found == whole, f"killed at effect {root.name}"
        seen[names] += 1
    print(f"died at {sum(seen.values()) - 1} effects: {seen[1]} times before the version had its name, {seen[2]} after")
    assert min(seen[1], seen[2]) > 1
