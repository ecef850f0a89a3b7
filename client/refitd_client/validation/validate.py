"""Whether a checkpoint may go to an engine. Pure: evidence in, one of three verdicts out.

    Valid      every byte was read, and everything agrees
    Invalid    proven bad: it is rejected for good
    Unknown    could not be read, or changed meanwhile: it is looked at again, and nothing is deleted

The checks run from the outside in (files, headers, index, manifest, tensors against the model, values), and the first
that fails is the reason.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from refitd_client.checkpoint.fault import Code, Fault
from refitd_client.checkpoint.inventory import LM_HEAD, Difference, Different, Reference, compare, listed
from refitd_client.checkpoint.nonfinite import NonFinite
from refitd_client.contract.manifest import digest_of_files
from refitd_client.contract.naming import ADAPTER_CONFIG_NAME, ADAPTER_NAME, Order
from refitd_client.contract.states import Kind
from refitd_client.validation.contents import Contents
from refitd_client.validation.delta import Base, content_faults, structure_faults
from refitd_client.validation.evidence import Evidence, Structure
from refitd_client.validation.lora import adapter_faults

NO_REFERENCE = (
    "there is no model to hold the checkpoint against: set --base-model (REFITD_BASE_MODEL) to the folder of the model "
    "that the engines serve"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is expected of a checkpoint, and what it may do. `run`, `order` and `kind` None: what its manifest says.

    `takes` is what the service's engines get: full versions, which deltas lead to, or adapters.
    """

    run: str | None = None
    order: Order | None = None
    kind: Kind | None = None
    allow_missing: bool = False
    allow_extra: bool = False
    allow_dtype_cast: bool = False
    takes: Kind = Kind.FULL


@dataclass(frozen=True, slots=True, kw_only=True)
class Valid:
    """Proven good. `inventory` digests names, shapes and dtypes; `digest` all bytes; `weights` those of the files that
    loaders read, and `shards` their names and sizes (None for a delta); `fingerprints` those of all tensors, where its
    manifest has them; `notes` are worth knowing.
    """

    inventory: str
    bytes: int
    digest: str
    weights: str | None
    shards: str | None
    fingerprints: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Invalid:
    """Proven bad."""

    code: Code
    reason: str


@dataclass(frozen=True, slots=True)
class Unknown:
    """Nobody can say yet."""

    reason: str
    code: Code


Verdict = Valid | Invalid | Unknown


def validate(evidence: Evidence, reference: Reference | Base | None, options: Options) -> Verdict:
    """Judge a checkpoint by all that is known of it. It is held against a model, and a delta against its base."""
    structure = evidence.structure
    if structure is None:
        return Unknown(evidence.failure or "the checkpoint was not read", Code.UNREADABLE)
    judged = judge(structure, reference, options)
    if judged is not None:
        return judged
    if evidence.contents is None:
        return Unknown("the weights were not read to their end", Code.UNREADABLE)
    fault = next(_content_faults(structure, evidence.contents), None) or next(_delta_faults(evidence, reference), None)
    if fault is not None:
        return Invalid(fault.code, fault.reason)
    if isinstance(reference, Base):
        return _valid_delta(structure, evidence.contents, reference)
    return Valid(
        inventory=structure.inventory.digest,
        bytes=structure.bytes,
        digest=_digest(structure, evidence.contents),
        weights=_weights(structure, evidence.contents.digests),
        shards=_weights(structure, {}),
        fingerprints=_fingerprints(structure),
        notes=tuple(_notes(structure, reference, options)),
    )


def _delta_faults(evidence: Evidence, base: Reference | Base | None) -> Iterator[Fault]:
    manifest = None if evidence.structure is None else evidence.structure.manifest
    if isinstance(base, Base) and manifest is not None:
        if evidence.delta is None:
            yield Fault(Code.BAD_DELTA, "its changes were not read")
        else:
            yield from content_faults(manifest, evidence.delta, base)


def _valid_delta(structure: Structure, contents: Contents, base: Base) -> Valid:
    return Valid(
        inventory=base.inventory.digest,
        bytes=structure.bytes,
        digest=_digest(structure, contents),
        weights=None,
        shards=None,
        fingerprints=_fingerprints(structure),
    )


def judge(structure: Structure, reference: Reference | Base | None, options: Options) -> Invalid | Unknown | None:
    """Judge what is known without reading the weights; None where nothing speaks against it so far."""
    fault = next(_structure_faults(structure, reference, options), None)
    if fault is None:
        return None
    return Invalid(fault.code, fault.reason) if fault.code.is_proof else Unknown(fault.reason, fault.code)


def _structure_faults(structure: Structure, reference: Reference | Base | None, options: Options) -> Iterator[Fault]:
    yield from (fault for fault in structure.faults if not fault.code.is_proof)  # what moves proves nothing
    carried_out = Kind.DELTA if isinstance(reference, Base) else options.takes
    yield from _kind_faults(structure, options, carried_out)
    yield from _identity_faults(structure, options)
    yield from structure.faults
    yield from _adapter_faults(structure, options)
    if isinstance(reference, Base):
        if structure.manifest is not None:
            yield from structure_faults(structure.manifest, list(structure.files), reference)
    elif reference is None:
        yield Fault(Code.NO_REFERENCE, NO_REFERENCE)
    elif structure.adapter is not None:
        yield from adapter_faults(structure.adapter, structure.inventory, reference)
    else:
        yield from _tensor_faults(structure, reference, options)


def _kind_faults(structure: Structure, options: Options, carried_out: Kind) -> Iterator[Fault]:
    kind = options.takes if structure.manifest is None else structure.manifest.kind
    if options.kind is not None and options.kind is not kind:
        text = f"the notice says kind {options.kind.value}, and the folder holds a {kind.value} version"
        yield Fault(Code.MANIFEST_MISMATCH, f"{text}: publish it with refitd's publisher")
    if kind is not carried_out:
        yield Fault(
            Code.UNSUPPORTED_KIND,
            f"refit.json says kind {kind.value}, which this service does not carry out: publish "
            f"{'adapters' if options.takes is Kind.LORA else 'in full'}",
        )


def _adapter_faults(structure: Structure, options: Options) -> Iterator[Fault]:
    if structure.adapter is not None and options.takes is not Kind.LORA:
        reason = "it is a LoRA adapter, and this service's engines get full versions: start it with --lora NAME"
        yield Fault(Code.UNSUPPORTED_KIND, reason)
    if structure.adapter is None and options.takes is Kind.LORA:
        reason = f"it is no LoRA adapter ({ADAPTER_CONFIG_NAME} and {ADAPTER_NAME}), and this service was started with "
        yield Fault(Code.UNSUPPORTED_KIND, f"{reason}--lora: full versions are another service's")


def _identity_faults(structure: Structure, options: Options) -> Iterator[Fault]:
    manifest = structure.manifest
    if manifest is None:
        return
    for what, said, expected in (
        ("run", manifest.run, options.run),
        ("generation", manifest.generation, options.order and options.order.generation),
        ("step", manifest.step, options.order and options.order.step),
    ):
        if expected is not None and said != expected:
            yield Fault(
                Code.MANIFEST_MISMATCH,
                f"refit.json says {what} {said}, and the folder is that of {what} {expected}: "
                "publish into the folder that the publisher chooses, and do not move or copy it",
            )


def _tensor_faults(structure: Structure, reference: Reference, options: Options) -> Iterator[Fault]:
    differences = _compare(structure, reference, options)
    for kind, (code, advice) in _ADVICE.items():
        found = [difference for difference in differences if difference.kind is kind]
        if found:
            yield Fault(code, f"{listed(found)} (the model is {reference.source}): {advice}")


_ADVICE = {
    Difference.SHAPE: (
        Code.WRONG_SHAPE,
        "publish full tensors in the names and shapes of save_pretrained, of the model that the engines serve",
    ),
    Difference.MISSING: (
        Code.MISSING_TENSOR,
        "an engine would go on with its old values; publish every tensor, or publish with allow_missing=True "
        "('refitd publish --allow-missing'; allow_missing in a notice)",
    ),
    Difference.EXTRA: (
        Code.EXTRA_TENSOR,
        "publish the tensors of the model that the engines serve, or publish with allow_extra=True "
        "('refitd publish --allow-extra'; allow_extra in a notice)",
    ),
    Difference.DTYPE: (
        Code.WRONG_DTYPE,
        "save in the model's dtype, or set --allow-dtype-cast (REFITD_ALLOW_DTYPE_CAST) to let engines cast",
    ),
}


def _compare(structure: Structure, reference: Reference, options: Options) -> list[Different]:
    return compare(
        structure.inventory,
        reference.inventory,
        tied=reference.tied,
        allow_missing=options.allow_missing,
        allow_extra=options.allow_extra,
        allow_dtype_cast=options.allow_dtype_cast,
    )


def _content_faults(structure: Structure, contents: Contents) -> Iterator[Fault]:
    if structure.manifest is not None:
        for name, file in sorted(structure.manifest.files.items()):
            if contents.digests.get(name) != file.digest:
                yield Fault(
                    Code.MANIFEST_MISMATCH,
                    f"{name} is not what refit.json says it is (digest {contents.digests.get(name)}, expected "
                    f"{file.digest}): its bytes were damaged or written over; publish the step again",
                )
    if contents.non_finite:
        yield Fault(Code.NON_FINITE, f"{_describe(contents.non_finite)}: the trainer has diverged or wrote damage")


def _describe(found: tuple[NonFinite, ...], limit: int = 3) -> str:
    sentences = [
        f"tensor {each.tensor} in {each.file} has {each.count} non-finite value{'s' * (each.count > 1)} (NaN or "
        f"infinity), the first at flat index {each.index}"
        for each in found[:limit]
    ]
    more = [f"and {len(found) - limit} more tensors"] if len(found) > limit else []
    return "; ".join(sentences + more)


def _digest(structure: Structure, contents: Contents) -> str:
    if structure.manifest is not None:
        return structure.manifest.digest
    return digest_of_files({name: (structure.files[name].size, digest) for name, digest in contents.digests.items()})


def _weights(structure: Structure, digests: Mapping[str, str]) -> str:
    return digest_of_files({name: (structure.files[name].size, digests.get(name, "")) for name in structure.headers})


def _fingerprints(structure: Structure) -> str | None:
    """One digest over the tensors' fingerprints: where two differ, so do the tensors, however they came about."""
    named = {} if structure.manifest is None else structure.manifest.fingerprints
    return digest_of_files({name: (0, text) for name, text in named.items()}) if named else None


def _notes(structure: Structure, reference: Reference | None, options: Options) -> Iterator[str]:
    stray = sorted(name for name in structure.files if name.endswith(".safetensors") and name not in structure.headers)
    if stray:
        yield f"not read by loaders, as the index does not name it: {', '.join(stray[:3])}"
    if reference is None:
        return
    if reference.tied and LM_HEAD in structure.inventory.tensors:
        yield f"{LM_HEAD} is not read by engines: the model's output layer is its embedding"
    differences = compare(structure.inventory, reference.inventory, tied=reference.tied)
    if differences:  # those that were allowed
        yield f"allowed to differ from the model: {listed(differences)}"
