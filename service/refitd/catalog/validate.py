"""Whether a checkpoint may go to an engine. Pure: evidence in, one of three verdicts out.

    Valid      every byte was read, and everything agrees
    Invalid    proven bad: it is rejected for good
    Unknown    could not be read, or changed meanwhile: it is looked at again, and nothing is deleted

The checks run from the outside in (files, headers, index, manifest, tensors against the model, values), and the first
that fails is the reason.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from refitd.catalog.adapter import adapter_faults
from refitd.catalog.contents import Contents
from refitd.catalog.evidence import Evidence, Structure
from refitd.catalog.fault import Code, Fault
from refitd.catalog.inventory import LM_HEAD, Difference, Different, Reference, compare, listed
from refitd.catalog.nonfinite import NonFinite
from refitd_client.contract.manifest import digest_of_files
from refitd_client.contract.naming import ADAPTER_CONFIG_NAME, ADAPTER_NAME, Order
from refitd_client.contract.states import Kind

NO_REFERENCE = (
    "there is no model to hold the checkpoint against: set --base-model (REFITD_BASE_MODEL) to the folder of the model "
    "that the engines serve"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is expected of a checkpoint, and what it may do. `run` and `order` None: whatever its manifest says.

    `kind` is what the service's engines take: full versions, or adapters.
    """

    run: str | None = None
    order: Order | None = None
    allow_missing: bool = False
    allow_extra: bool = False
    allow_dtype_cast: bool = False
    kind: Kind = Kind.FULL


@dataclass(frozen=True, slots=True, kw_only=True)
class Valid:
    """Proven good. `inventory` digests names, shapes and dtypes; `digest` all bytes; `weights` those of the files that
    loaders read, and `shards` their names and sizes; `notes` are worth knowing.
    """

    inventory: str
    bytes: int
    digest: str
    weights: str
    shards: str
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


def validate(evidence: Evidence, reference: Reference | None, options: Options) -> Verdict:
    """Judge a checkpoint by all that is known of it."""
    structure = evidence.structure
    if structure is None:
        return Unknown(evidence.failure or "the checkpoint was not read", Code.UNREADABLE)
    judged = judge(structure, reference, options)
    if judged is not None:
        return judged
    if evidence.contents is None:
        return Unknown("the weights were not read to their end", Code.UNREADABLE)
    fault = next(_content_faults(structure, evidence.contents), None)
    if fault is not None:
        return Invalid(fault.code, fault.reason)
    return Valid(
        inventory=structure.inventory.digest,
        bytes=structure.bytes,
        digest=_digest(structure, evidence.contents),
        weights=_weights(structure, evidence.contents.digests),
        shards=_weights(structure, {}),
        notes=tuple(_notes(structure, reference, options)),
    )


def judge(structure: Structure, reference: Reference | None, options: Options) -> Invalid | Unknown | None:
    """Judge what is known without reading the weights; None where nothing speaks against it so far."""
    fault = next(_structure_faults(structure, reference, options), None)
    if fault is None:
        return None
    return Invalid(fault.code, fault.reason) if fault.code.is_proof else Unknown(fault.reason, fault.code)


def _structure_faults(structure: Structure, reference: Reference | None, options: Options) -> Iterator[Fault]:
    yield from (fault for fault in structure.faults if not fault.code.is_proof)  # what moves proves nothing
    yield from _identity_faults(structure, options)
    yield from structure.faults
    yield from _kind_faults(structure, options)
    if reference is None:
        yield Fault(Code.NO_REFERENCE, NO_REFERENCE)
    elif structure.adapter is not None:
        yield from adapter_faults(structure.adapter, structure.inventory, reference)
    else:
        yield from _tensor_faults(structure, reference, options)


def _kind_faults(structure: Structure, options: Options) -> Iterator[Fault]:
    if structure.adapter is not None and options.kind is not Kind.LORA:
        reason = "it is a LoRA adapter, and this service's engines get full versions: start it with --lora NAME"
        yield Fault(Code.UNSUPPORTED_KIND, reason)
    if structure.adapter is None and options.kind is Kind.LORA:
        reason = f"it is no LoRA adapter ({ADAPTER_CONFIG_NAME} and {ADAPTER_NAME}), and this service was started with "
        yield Fault(Code.UNSUPPORTED_KIND, f"{reason}--lora: full versions are another service's")


def _identity_faults(structure: Structure, options: Options) -> Iterator[Fault]:
    manifest = structure.manifest
    if manifest is None:
        return
    if manifest.kind is not options.kind:
        yield Fault(
            Code.UNSUPPORTED_KIND,
            f"refit.json says kind {manifest.kind.value}, and this service carries out {options.kind.value} ones",
        )
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
        "an engine would go on with its old values; publish every tensor, or say allow_missing in the notice",
    ),
    Difference.EXTRA: (
        Code.EXTRA_TENSOR,
        "publish the tensors of the model that the engines serve, or say allow_extra in the notice",
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
