"""A version's files as a slot, as the service hands them back."""

from pathlib import Path

from refitd_client.checkpoint.header import layout
from refitd_client.contract.naming import layout_of, slot_name, slots_path


def hand_back(root: Path, version: Path) -> Path:
    """Make a slot of a version of run `run`: one at a time, since all get one name."""
    for path in version.iterdir():
        if path.suffix != ".safetensors":
            path.unlink()
    slot = root / slots_path("run") / slot_name(layout_of(map(layout, version.iterdir())), "f" * 32)
    slot.parent.mkdir(parents=True, exist_ok=True)
    return version.rename(slot)
