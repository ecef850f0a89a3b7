"""Whether a checkpoint may go to an engine. Pure: evidence in, one of three verdicts out.

    Valid      every byte was read, and everything agrees
    Invalid    proven bad: it is rejected for good
    Unknown    could not be read, or changed meanwhile: it is read again, and nothing is deleted

The checks run from the outside in (files, headers, index, manifest, tensors against the model, values), and the first
that fails is the reason. `examine.py` gathers the evidence.

A full version is also proved by its tensors' fingerprints. A rank of an engine digests no files: its GPU computes the
fingerprint of each tensor at the speed of the bus. Together with what is read without the tensors (headers, index,
sizes, the files beside the weights) equal fingerprints prove as much: a header names each byte after it as a part of
one tensor, without gaps. The ranks share the tensors out, and each says what it found in one digest, which the service
computes from the manifest for the same tensors.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from refitd_client.checkpoint.fault import Code, Defect
from refitd_client.checkpoint.header import SCALES_END, Header, is_scales
from refitd_client.checkpoint.inventory import Difference, Different, Inventory, Reference, compare, listed, not_a_copy
from refitd_client.checkpoint.opening import FileStat
from refitd_client.contract.manifest import Manifest, digest_of_files
from refitd_client.contract.naming import ADAPTER_CONFIG_NAME, ADAPTER_NAME, Order
from refitd_client.contract.states import Kind
from refitd_client.validation.base import Base, delta_checks
from refitd_client.validation.contents import Contents
from refitd_client.validation.lora import AdapterConfig, adapter_faults

NO_REFERENCE = (
    "there is no model to hold the checkpoint against: set --base-model (REFITD_BASE_MODEL) to the folder of the model "
    "that the engines serve"
)
_TENSORS_SHOWN = 3  # tensors or files that a sentence names


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """What a folder holds, as far as that is known without its weights: listing, manifest, index and headers.

    `files` are all its regular files, `headers` those of the weight files that a loader would read, `inventory` the
    tensors in them. `faults` is what does not agree, the most fundamental first. `signature` is empty if the folder
    could not be opened. `awaits` is set while its trainer has not yet written the file that it writes last. `hole` and
    `zeros` are set where there is no manifest, and a weight file has a hole or ends in zeros, as one that was made in
    full size and is filled later. `adapter` is set if it is a LoRA adapter's folder.
    """

    path: str
    signature: str = ""
    files: Mapping[str, FileStat]
    manifest: Manifest | None = None
    has_manifest: bool = False
    headers: Mapping[str, Header]
    inventory: Inventory
    faults: tuple[Defect, ...] = ()
    awaits: str | None = None
    hole: str | None = None
    zeros: str | None = None
    adapter: AdapterConfig | None = None

    @property
    def reason(self) -> str | None:
        """What does not agree, None if headers, index, manifest and files do."""
        return self.faults[0].reason if self.faults else None

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that is needed for a verdict.

    `contents` is None if the structure alone already decides. `delta` is what `delta_checks` read, None of a full
    version. `copies` are the output layers whose bytes are those of the embedding that they are tied to. `failure`
    alone is set if the folder could not be read.
    """

    structure: Structure | None = None
    contents: Contents | None = None
    copies: frozenset[str] = frozenset()
    delta: Any = None
    failure: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is expected of a checkpoint, and what it may do. `run`, `order` and `kind` None: what its manifest says.

    `allow_missing` are patterns of the names of tensors that it may lack.
    `takes` is what the service's engines get: full versions, which deltas lead to, or adapters.
    """

    run: str | None = None
    order: Order | None = None
    kind: Kind | None = None
    allow_missing: tuple[str, ...] = ()
    allow_extra: bool = False
    allow_dtype_cast: bool = False
    takes: Kind = Kind.FULL


@dataclass(frozen=True, slots=True, kw_only=True)
class Valid:
    """Proven good. `inventory` digests names, shapes and dtypes; `digest` all bytes; `weights` those of the files that
    loaders read, and `shards` their names and sizes (None for a delta); `fingerprints` those of all tensors, if its
    manifest has them: versions with equal ones have equal tensors. `left_out` are the names of the tensors that it
    lacks of those of the model; a delta lacks what its base does. `notes` are worth knowing.
    """

    inventory: str
    bytes: int
    digest: str
    weights: str | None
    shards: str | None
    fingerprints: str | None = None
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Invalid:
    """Proven bad."""

    code: Code
    reason: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """Neither proven good nor proven bad yet."""

    reason: str
    code: Code


Verdict = Valid | Invalid | Unknown


def validate(evidence: Evidence, reference: Reference | Base | None, options: Options) -> Verdict:
    """Judge a checkpoint by all that is known of it. The reference is the model, or the base of a delta."""
    structure, contents = evidence.structure, evidence.contents
    if structure is None:
        return Unknown(evidence.failure or "the checkpoint was not read", Code.UNREADABLE)
    judged = judge(structure, reference, options)
    if judged is not None:
        return judged
    if contents is None:
        return Unknown("the weights were not read to their end", Code.UNREADABLE)
    fault = next(_content_faults(structure, contents, evidence, reference), None)
    if fault is not None:
        return Invalid(fault.code, fault.reason)
    manifest, is_delta = structure.manifest, isinstance(reference, Base)
    named, read = {} if manifest is None else manifest.fingerprints, contents.digests
    return Valid(
        inventory=reference.inventory.digest if isinstance(reference, Base) else structure.inventory.digest,
        bytes=structure.bytes,
        digest=_digest(structure, read) if manifest is None else manifest.digest,
        weights=None if is_delta else _digest(structure, {name: read.get(name, "") for name in structure.headers}),
        shards=None if is_delta else _digest(structure, dict.fromkeys(structure.headers, "")),
        fingerprints=digest_of_files({name: (0, text) for name, text in named.items()}) if named else None,
        left_out=() if isinstance(reference, Base) else tuple(_left_out(structure, reference)),
        notes=() if isinstance(reference, Base) else tuple(_notes(structure, reference)),
    )


def judge(structure: Structure, reference: Reference | Base | None, options: Options) -> Invalid | Unknown | None:
    """Judge, as `validate`, what is known without the weights; None if nothing speaks against it so far."""
    fault = next(_structure_faults(structure, reference, options), None)
    if fault is None:
        return None
    return Invalid(fault.code, fault.reason) if fault.code.is_proof else Unknown(fault.reason, fault.code)


def pairs_of(structure: Structure, reference: Reference | Base | None) -> Mapping[str, str]:
    """The output layers of a full version that have to be copies of its embeddings, and those."""
    if not isinstance(reference, Reference) or structure.adapter is not None:
        return {}
    return reference.pairs_in(structure.inventory)


def _structure_faults(structure: Structure, reference: Reference | Base | None, options: Options) -> Iterator[Defect]:
    yield from (fault for fault in structure.faults if not fault.code.is_proof)  # what moves proves nothing
    yield from _kind_faults(structure, options, Kind.DELTA if isinstance(reference, Base) else options.takes)
    yield from _identity_faults(structure, options)
    yield from structure.faults
    if structure.adapter is not None and options.takes is not Kind.LORA:
        reason = "it is a LoRA adapter, and this service's engines get full versions: start it with --lora NAME"
        yield Defect(Code.UNSUPPORTED_KIND, reason)
    if structure.adapter is None and options.takes is Kind.LORA:
        reason = f"it is no LoRA adapter ({ADAPTER_CONFIG_NAME} and {ADAPTER_NAME}), and this service was started with "
        yield Defect(Code.UNSUPPORTED_KIND, f"{reason}--lora: full versions are another service's")
    if isinstance(reference, Base):
        if structure.manifest is not None:
            yield from delta_checks().structure_faults(structure.manifest, list(structure.files), reference)
    elif reference is None:
        yield Defect(Code.NO_REFERENCE, NO_REFERENCE)
    elif structure.adapter is not None:
        yield from adapter_faults(structure.adapter, structure.inventory, reference)
    else:
        yield from _tensor_faults(structure, reference, options)


def _kind_faults(structure: Structure, options: Options, carried_out: Kind) -> Iterator[Defect]:
    kind = options.takes if structure.manifest is None else structure.manifest.kind
    if options.kind is not None and options.kind is not kind:
        text = f"the notice says kind {options.kind.value}, and the folder holds a {kind.value} version"
        yield Defect(Code.MANIFEST_MISMATCH, f"{text}: publish it with refitd's publisher")
    if kind is not carried_out:
        yield Defect(
            Code.UNSUPPORTED_KIND,
            f"refit.json says kind {kind.value}, which this service does not carry out: publish "
            f"{'adapters' if options.takes is Kind.LORA else 'in full'}",
        )


def _identity_faults(structure: Structure, options: Options) -> Iterator[Defect]:
    manifest = structure.manifest
    if manifest is None:
        return
    for what, said, expected in (
        ("run", manifest.run, options.run),
        ("generation", manifest.generation, options.order and options.order.generation),
        ("step", manifest.step, options.order and options.order.step),
    ):
        if expected is not None and said != expected:
            yield Defect(
                Code.MANIFEST_MISMATCH,
                f"refit.json says {what} {said}, and the folder is that of {what} {expected}: "
                "publish into the folder that the publisher chooses, and do not move or copy it",
            )


def _tensor_faults(structure: Structure, reference: Reference, options: Options) -> Iterator[Defect]:
    differences = compare(
        structure.inventory,
        reference,
        allow_missing=options.allow_missing,
        allow_extra=options.allow_extra,
        allow_dtype_cast=options.allow_dtype_cast,
    )
    yield from _quantisation_faults(differences, structure.inventory, reference)
    strangers = [each for each in differences if each.kind is Difference.EXTRA]
    for kind, (code, advice) in _ADVICE_ON.items():
        found = [difference for difference in differences if difference.kind is kind]
        if found:
            what_to_do = advice
            if kind is Difference.MISSING and strangers:
                what_to_do = _RENAMED.format(count=len(strangers), first=strangers[0].name[:100])
            yield Defect(code, f"{listed(found)} (the model is {reference.source}): {what_to_do}")


def _quantisation_faults(differences: list[Different], checkpoint: Inventory, reference: Reference) -> Iterator[Defect]:
    """Weights that are in fp8 blocks on one side alone. That scales are missing or extra follows from it."""
    for each in differences:
        if each.kind is not Difference.DTYPE:
            continue
        scales = each.name.removesuffix("weight") + SCALES_END
        if (scales in checkpoint.tensors) == (scales in reference.inventory.tensors):
            continue
        advice = (
            "the engines serve it in fp8, in blocks of 128 by 128: publish with dtype='fp8_block' and the engines' "
            "model as base_model, or publish a checkpoint in this form"
            if scales in reference.inventory.tensors
            else "the engines serve it unquantised: publish without dtype='fp8_block', or with the fp8 model that they "
            "serve as base_model"
        )
        yield Defect(Code.WRONG_DTYPE, f"{each} (the model is {reference.source}): {advice}")
        return


_ADVICE_ON = {
    Difference.SHAPE: (
        Code.WRONG_SHAPE,
        "publish full tensors in the names and shapes of save_pretrained, of the model that the engines serve",
    ),
    Difference.MISSING: (
        Code.MISSING_TENSOR,
        "publish every tensor, or name what is to be missing, such as allow_missing=['mtp.*'] ('refitd publish "
        "--allow-missing 'mtp.*''; allow_missing in a notice)",
    ),
    Difference.EXTRA: (
        Code.EXTRA_TENSOR,
        "publish the tensors of the model that the engines serve, or publish with allow_extra=True "
        "('refitd publish --allow-extra'; allow_extra in a notice)",
    ),
    Difference.DTYPE: (
        Code.WRONG_DTYPE,
        "publish tensors with base_model= and dtype= of a publisher, which keeps each one's dtype of the model, or let "
        "engines cast: --allow-dtype-cast of the service",
    ),
}


_RENAMED = (
    "{count} tensors that it has are none of the model's, the first of them {first}: publish the module and not its "
    "state dict, or set rename= of a publisher"
)


def _content_faults(
    structure: Structure, contents: Contents, evidence: Evidence, reference: Reference | Base | None
) -> Iterator[Defect]:
    manifest, delta = structure.manifest, evidence.delta
    for name, file in sorted(manifest.files.items()) if manifest is not None else ():
        if contents.digests.get(name) != file.digest:
            yield Defect(
                Code.MANIFEST_MISMATCH,
                f"{name} is not what the manifest says it is (digest {contents.digests.get(name)}, expected "
                f"{file.digest}): its bytes were damaged or written over; publish the step again",
            )
    if contents.non_finite:
        sentences = [
            f"tensor {each.tensor} in {each.file} has {each.count} non-finite value{'s' * (each.count > 1)} (NaN or "
            f"infinity{', or a scale not above 0' * each.tensor.endswith(SCALES_END)}), the first at flat index "
            f"{each.index}"
            for each in contents.non_finite[:_TENSORS_SHOWN]
        ]
        more = len(contents.non_finite) - _TENSORS_SHOWN
        sentences += [f"and {more} more tensors"] if more > 0 else []
        yield Defect(Code.NON_FINITE, f"{'; '.join(sentences)}: the trainer has diverged or wrote damage")
    for copy, first in pairs_of(structure, reference).items():
        if copy not in evidence.copies:
            yield Defect(Code.NO_COPY, not_a_copy(copy, first))
    if isinstance(reference, Base) and manifest is not None:
        if delta is None:
            yield Defect(Code.BAD_DELTA, "its changes were not read")
        else:
            yield from delta_checks().content_faults(manifest, delta, reference)


def _digest(structure: Structure, digests: Mapping[str, str]) -> str:
    return digest_of_files({name: (structure.files[name].size, digest) for name, digest in digests.items()})


def _notes(structure: Structure, reference: Reference | None) -> Iterator[str]:
    stray = sorted(name for name in structure.files if name.endswith(".safetensors") and name not in structure.headers)
    if stray:
        yield f"not read by loaders, as the index does not name it: {', '.join(stray[:_TENSORS_SHOWN])}"
    if reference is None or structure.adapter is not None:
        return
    for copy, first in pairs_of(structure, reference).items():
        yield f"{copy} is a copy of {first}, to which the model ties it"
    differences = [each for each in compare(structure.inventory, reference) if each.kind is not Difference.MISSING]
    if differences:  # those that were allowed
        yield f"allowed to differ from the model: {listed(differences)}"


def _left_out(structure: Structure, reference: Reference | None) -> Iterator[str]:
    if reference is not None and structure.adapter is None:
        found = compare(structure.inventory, reference)
        yield from sorted(each.name for each in found if each.kind is Difference.MISSING)


def unprovable(seen: Structure) -> str | None:
    """Why a version cannot be proved by fingerprints, in a sentence without a subject; None where it can."""
    manifest = seen.manifest
    if manifest is None or manifest.kind is not Kind.FULL or seen.adapter is not None:
        return "is no full version of refitd's publisher"
    if manifest.fingerprints.keys() != seen.inventory.tensors.keys():
        return "has no fingerprint of each tensor in its manifest"
    if any(is_scales(name, tensor.dtype) for name, tensor in seen.inventory.tensors.items()):
        return "has scales, which have to be above 0 and not only finite"
    return None


def share_of(headers: Mapping[str, Header], rank: int, ranks: int) -> list[str]:
    """The names of the tensors that one of `ranks` ranks reads, in their order: about the same number of bytes each."""
    sizes = [(name, spec.end - spec.start) for file in sorted(headers) for name, spec in headers[file].tensors.items()]
    total, begin, found = sum(size for _, size in sizes), 0, list[str]()
    for name, size in sizes:
        if begin * ranks // max(total, 1) == rank or (begin == total > 0 and rank == ranks - 1):
            found.append(name)
        begin += size
    return found


def proof_digest(fingerprints: Mapping[str, str], names: Iterable[str]) -> str:
    """One digest of the fingerprints (16 hex digits each) of some tensors, in their order."""
    hasher = xxhash.xxh3_128()
    for name in names:
        hasher.update(f"{name}\0{fingerprints[name]}\n".encode())
    return f"xxh3:{hasher.hexdigest()}"
