"""What the settings say about reclaiming. Commands that only read the settings import this, and no store."""

from dataclasses import dataclass
from pathlib import Path

from refitd.policy.keep import KeepRules
from refitd.policy.spare_slots import SlotRules
from refitd.root.file_systems import root_file_system, wants_polling


@dataclass(frozen=True, slots=True, kw_only=True)
class ReclaimRules:
    """What is kept, what of the rest becomes a slot, and when it goes.

    Attributes:
        interval: seconds between two sweeps when nothing changes.
        incoming_ttl: seconds after which a folder that a dead publisher left goes.
        keep: which versions stay.
        slots: what is recycled.
    """

    interval: float
    incoming_ttl: float
    keep: KeepRules
    slots: SlotRules


def why_no_slots(count: int, root: Path) -> str | None:
    """Why nothing is recycled; None where it is: on file systems of this machine, where a rename arbitrates for all."""
    kind = root_file_system(root)
    if not count:
        return "slots are off (--slots 0)"
    if kind != "overlay" and wants_polling(kind):
        return f"the root is on {kind}: slots are for tmpfs and local file systems"
    return None
