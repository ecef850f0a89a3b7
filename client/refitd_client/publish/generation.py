"""Which (generation, step) a publication gets: pure, but for reading what the run's folder knows.

    first publication of a publisher, run at g2 step 40       step 41 → g2 step 41 (it goes on)
                                                              step 40 → g3 step 40 (the trainer was restarted)
    later publication, after g2 step 41                       step 42 → g2 step 42
                                                              step 41 → conflict
    g2 step 42 had its name, which could not be synced        step 42 → g3 step 42, as after a restart

What counts as published is every `v…` folder and the record `.publisher.json`, which is written before a version gets
its name. So a version that was reclaimed meanwhile still counts, and so does one that a crash kept from its name: a
restart never reuses a name that somebody may have heard of.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from refitd_client.contract.naming import Order, parse_version_folder
from refitd_client.errors import PublishError
from refitd_client.files.plain_file import read_plain

RECORD_NAME = ".publisher.json"
_LONGEST = 4096  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """The step is not after `last`, which this publisher published."""

    last: Order


def decide(step: int, *, found: Order | None, own: Order | None) -> Order | Conflict:
    """Place a step. `found` is the newest that the publisher found, `own` the last that it published itself."""
    if own is not None:
        return Order(own.generation, step) if step > own.step else Conflict(last=own)
    if found is None:
        return Order(1, step)
    return Order(found.generation if step > found.step else found.generation + 1, step)


def newest_in(folder: Path) -> Order | None:
    """The newest that was ever published in a run's folder, by its `v…` folders and the record.

    Raises:
        PublishError: the record cannot be read as one.
    """
    names = (entry.name for entry in folder.iterdir() if not entry.is_symlink())  # a link is never a version
    orders = [order for name in names if (order := parse_version_folder(name)) is not None]
    record = _read_record(folder / RECORD_NAME)
    return max([*orders, *([] if record is None else [record])], default=None)


def to_record(order: Order) -> bytes:
    """The content of the record."""
    return msgspec.json.encode(order)


def _read_record(path: Path) -> Order | None:
    try:
        return msgspec.json.decode(read_plain(path, _LONGEST), type=Order)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise PublishError(
            f"{path} does not hold the last generation and step of the run ({error}): remove it if "
            "all of the run's versions are still in its folder, else restore it"
        ) from error
