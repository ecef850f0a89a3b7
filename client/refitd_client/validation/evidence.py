"""What is known of a checkpoint's files: the facts that `examine` gathers and `validate` judges."""

from collections.abc import Mapping
from dataclasses import dataclass

from refitd_client.checkpoint.fault import Fault
from refitd_client.checkpoint.inventory import Inventory
from refitd_client.checkpoint.opening import FileStat
from refitd_client.checkpoint.strict_header import Header
from refitd_client.contract.manifest import Manifest
from refitd_client.validation.contents import Contents
from refitd_client.validation.delta import DeltaContents
from refitd_client.validation.lora import AdapterConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """What a look at a folder tells without reading the weights: listing, manifest, index and headers.

    `files` are all its regular files, `headers` those of the weight files that a loader would read, `inventory` the
    tensors in them. `faults` is what does not agree, the most fundamental first. `signature` is empty where the folder
    could not be opened. `awaits` says that its trainer has not yet written what it writes last. `adapter` is set where
    it is a LoRA adapter's folder.
    """

    path: str
    signature: str = ""
    files: Mapping[str, FileStat]
    manifest: Manifest | None = None
    has_manifest: bool = False
    headers: Mapping[str, Header]
    inventory: Inventory
    faults: tuple[Fault, ...] = ()
    awaits: str | None = None
    adapter: AdapterConfig | None = None

    @property
    def reason(self) -> str | None:
        """What does not agree, None where headers, index, manifest and files do."""
        return self.faults[0].reason if self.faults else None

    @property
    def bytes(self) -> int:
        """The size of all its files."""
        return sum(file.size for file in self.files.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that is needed for a verdict.

    `contents` is None where the structure alone already decides, `delta` where the version is none. `failure` is set
    instead of all where the folder could not be read.
    """

    structure: Structure | None = None
    contents: Contents | None = None
    delta: DeltaContents | None = None
    failure: str | None = None
