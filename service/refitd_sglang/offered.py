"""A version in a trainer's memory on this host, on its way into a model: by the load plan, like one on disk.

Of an offer only its file is read before the pause. In the pause it is held while the tensors are copied: the trainer
waits for that. What was copied counts if the trainer lives and stands by it then, and the fingerprints are the offer's.
"""

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from refitd.catalog.evidence import Structure
from refitd.catalog.header import Header, TensorSpec
from refitd.catalog.inventory import Reference, compare, inventory_of, listed
from refitd_client.contract.naming import SERVICE_FOLDER, parse_version_folder, parse_version_id, version_folder
from refitd_client.handover import lender
from refitd_client.handover.lent import Borrowed
from refitd_client.handover.offer import DevicePlace, HostPlace, Offer, OfferRefusedError
from refitd_client.handover.secret import SecretRefusedError, read_secret
from refitd_client.handover.taking import Taker
from refitd_sglang import driver
from refitd_sglang.contents import differing, equal
from refitd_sglang.feeding import Feed
from refitd_sglang.source import Place, Source, SourceRefusedError, is_version, mapped
from refitd_sglang.standing import Standing

if TYPE_CHECKING:
    from refitd_sglang.loading import Call, Loading, Readied
    from refitd_sglang.road import Order

_LOOK_SECONDS = 1.0  # between two looks whether a trainer is still there


@dataclass(frozen=True, slots=True)
class Allocation:
    """Memory of another process, as a file's would be: where it begins."""

    address: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory(Source):
    """What `Source` is of files, of a trainer's memory. Its "files" are allocations."""

    offer: Offer
    taker: "Keeper"

    @property
    def digest(self) -> str:
        """Of names, shapes, dtypes and fingerprints."""
        return self.structure.signature

    @property
    def label(self) -> str:
        """The id of the version."""
        return self.offer.version

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.offer.tensors)

    def is_unchanged(self) -> bool:
        """Nothing of it may be read once the offer is over: whoever wants it again goes to the version's files."""
        return False

    @property
    def order(self) -> "Order":
        """As `Source`."""
        return driver.between_devices

    def registered(self, registry: Any, device: int) -> dict[str, Any] | None:
        """Where each allocation is seen from a GPU; None where one is not on a GPU."""
        return self.taker.addresses(self.offer, device)

    def tensors(self) -> dict[str, Any]:
        """Views of the tensors."""
        return {tensor.name: self.taker.tensor(tensor) for tensor in self.offer.tensors}


class Keeper:
    """What a rank has opened of trainers' memory. Given back when the next offer does not name it, or soon after the
    trainer is gone: memory that somebody holds open is not free, and the next trainer may need it.
    """

    def __init__(self) -> None:
        self._taker = Taker()
        self._turn = threading.RLock()
        self._lender: Path | None = None
        self._offer: Offer | None = None
        self._watching = False

    def open(self, offer: Offer, folder: Path) -> None:
        """Take over what an offer of the trainer in a run's folder names; the rest is given back.

        Raises:
            SourceRefusedError: it is of another host, or of before a boot.
        """
        with self._turn:
            self._taker.begin(offer)
            self._lender, self._offer = folder, offer
            if not self._watching:
                self._watching = True
                threading.Thread(target=self._watch, name="refitd-lender", daemon=True).start()

    def tensor(self, tensor: Any) -> Any:
        """A view of a tensor that an offer names."""
        with self._turn:
            return self._taker.tensor(tensor)

    def addresses(self, offer: Offer, device: int) -> dict[str, Any] | None:
        """The allocations that an offer names, seen from a GPU. None where one is in host memory."""
        places = [tensor.place for tensor in offer.tensors if tensor.nbytes]
        with self._turn:
            if not all(isinstance(place, DevicePlace) for place in places):
                return None
            handles = {place.handle for place in places if isinstance(place, DevicePlace)}
            return {handle.hex(): Allocation(self._taker.address(handle, device)) for handle in handles}

    def close(self) -> None:
        """Give back all."""
        with self._turn:
            self._taker.keep(None)
            self._lender = self._offer = None

    @contextmanager
    def holding(self, offer: Offer) -> Generator[None]:
        """While this context lasts nothing is given back.

        Raises:
            SourceRefusedError: what this offer names was given back already.
        """
        with self._turn:
            if self._offer is not offer:
                raise SourceRefusedError("the offer is not the last that was looked at")
            yield

    def _watch(self) -> None:
        while True:
            time.sleep(_LOOK_SECONDS)
            with self._turn:
                if self._lender is not None and not lender.is_there(self._lender):
                    self.close()


@dataclass(slots=True, eq=False, kw_only=True)
class Offered:
    """As `Way`."""

    source: Memory
    loading: "Loading"
    borrowed: Borrowed
    readied: "Readied | None" = None
    proved: int = 0
    _others: list[int] | None = None
    _prints: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])

    kind = "handover"

    @property
    def label(self) -> str:
        """As `Way`."""
        return self.source.label

    @property
    def digest(self) -> str:
        """As `Way`."""
        return self.source.digest

    @property
    def signature(self) -> str:
        """As `Way`."""
        return self.source.digest

    @property
    def nbytes(self) -> int:
        """As `Way`."""
        return self.source.nbytes

    @property
    def folder(self) -> Path:
        """Where its files will be."""
        return self.source.place.folder

    def is_unchanged(self) -> bool:
        """As `Way`: whether it is still offered."""
        return self.borrowed.is_lent

    @property
    def watches(self) -> bool:
        """As `Way`."""
        ready = self.readied
        return ready is not None and ready.road.watch is not None and self.loading.has(ready.plan)

    def fit(self, standing: Standing | None, contents: dict[str, str]) -> None:
        """It fits whatever is there: its tensors are those of the model."""

    def write(self, call: "Call") -> tuple[Feed, str | None]:
        """As `Way`. From here to the end of `check` the trainer waits."""
        loaded = False
        try:
            with self.source.taker.holding(self.source.offer):
                self.borrowed.hold()
                feed, fault = self.loading.load(call, self.source, partial=False, readied=self.readied)
        except (OfferRefusedError, SourceRefusedError) as error:
            return Feed({}), str(error)
        else:
            self._others, loaded = feed.others, fault is None
            return feed, fault
        finally:
            if not loaded:
                self._over()

    def check(self, contents: dict[str, str]) -> str | None:
        """As `Way`: all that is only copied has the fingerprints of the offer, and the trainer still stands by it."""
        try:
            if not self.borrowed.is_lent:
                return "the trainer is gone, or took its tensors back while they were copied"
            expected = {tensor.name: tensor.fingerprint for tensor in self.source.offer.tensors}
            self._prints = self.loading.prints(self.source, contents, self._others)
            self.proved = equal(self._prints, expected)
            fault = differing(self._prints, expected)
            if fault is not None:
                self.source.taker.close()  # what was opened may not be what the trainer has there now
            return None if fault is None else fault.replace("refit.json says", "the offer says")
        finally:
            self._over()

    def put_back(self, call: "Call", previous: Standing | None, path: str) -> str | None:
        """As `Way`: through the loader, since the plan may be at fault."""
        if previous is None:
            return "what was served before cannot be read any more"
        return self.loading.put_back(call, previous.tensors(), path)

    def standing(self, contents: dict[str, str]) -> Standing | None:
        """As `Way`. Its files are not there yet: see `with_files`."""
        return Standing(source=self.source, contents=contents, prints=self._prints)

    def _over(self) -> None:
        self.borrowed.let_go()
        self.borrowed.close()


def open_offer(
    place: Place, offer: str, reference: Reference, loading: "Loading", keeper: Keeper, devices: int
) -> Offered:
    """Look at an offer of the version that will be at `place`; `offer` is its file's path beneath the root.

    Raises:
        SourceRefusedError: it is not one to load into the model that `reference` describes.
        OSError: it cannot be read.
    """
    try:
        borrowed = Borrowed(place.root / offer, read_secret(place.root))
        if not borrowed.is_lent:
            raise SourceRefusedError("the offer was withdrawn, or its trainer is gone")
        keeper.open(borrowed.offer, (place.root / offer).parent)
        memory = Memory(
            place=place, structure=_structure(place, borrowed.offer), maps={}, offer=borrowed.offer, taker=keeper
        )
    except (OfferRefusedError, SecretRefusedError) as error:
        raise SourceRefusedError(str(error)) from error
    _check(memory, reference, devices)
    return Offered(source=memory, loading=loading, borrowed=borrowed)


def is_promised(path: str) -> bool:
    """Whether a version's files may yet come here: a root's folder of that name, and nothing there."""
    folder = Path(path)
    return (
        parse_version_folder(folder.name) is not None
        and not folder.exists()
        and any((above / SERVICE_FOLDER).is_dir() for above in folder.absolute().parents)
    )


def with_files(standing: Standing | None) -> Standing | None:
    """What is served, made of files where it came from memory; None where they are not there: it cannot be put back."""
    if standing is None or not isinstance(standing.source, Memory):
        return standing
    if not is_version(str(standing.source.place.folder)):
        return None
    return replace(standing, source=mapped(standing.source.place))


def _check(memory: Memory, reference: Reference, devices: int) -> None:
    parsed = parse_version_id(memory.label)
    if parsed is None or memory.place.path != f"{parsed[0]}/{version_folder(parsed[1])}":
        raise SourceRefusedError(f"the offer is of {memory.label}, whose files will not be at {memory.place.path}")
    if not devices and any(isinstance(tensor.place, DevicePlace) for tensor in memory.offer.tensors):
        raise SourceRefusedError("the trainer's tensors are on a GPU, and this model is not")
    if differences := compare(memory.structure.inventory, reference.inventory, tied=reference.tied):
        raise SourceRefusedError(f"the offer does not fit the model: {listed(differences)}")


def _structure(place: Place, offer: Offer) -> Structure:
    """What a look at its files would tell."""
    tensors: dict[str, dict[str, TensorSpec]] = {}
    hasher = xxhash.xxh3_128(offer.version.encode())
    for each in offer.tensors:
        where = each.place.path if isinstance(each.place, HostPlace) else each.place.handle.hex()
        spec = TensorSpec(each.dtype, each.shape, each.place.offset, each.place.offset + each.nbytes)
        tensors.setdefault(where, {})[each.name] = spec
        hasher.update(f"{each.name}\0{each.dtype}\0{each.shape}\0{each.fingerprint}\n".encode())
    headers = {where: Header(tensors=some, data_start=0, metadata={}) for where, some in tensors.items()}
    return Structure(
        path=place.path,
        signature=f"offer:{hasher.hexdigest()}",
        files={},
        headers=headers,
        inventory=inventory_of(headers),
    )
