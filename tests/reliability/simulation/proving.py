"""What the GPUs of a server's ranks find in a folder: fingerprints that stand for its content, and its damage."""

from dataclasses import replace

from refitd.engine.port import RankProof
from refitd_client.contract.manifest import Manifest
from refitd_client.validation.contents import Contents
from refitd_client.validation.validate import Evidence, Structure, proof_digest, share_of


def fingerprints(seen: Structure, content: int) -> dict[str, str]:
    return {name: f"{(content << 16) + number:016x}" for number, name in enumerate(sorted(seen.inventory.tensors))}


def with_fingerprints(seen: Structure, manifest: Manifest, content: int) -> Manifest:
    """The manifest as a publisher writes it that was asked for fingerprints."""
    return replace(manifest, fingerprints=fingerprints(seen, content))


def found(seen: Structure, content: int, rank: int, ranks: int, *, flipped: bool, nan: bool) -> RankProof:
    """What a rank finds in its share.

    Args:
        seen: what the folder looks like.
        content: what its tensors hold.
        rank: the rank.
        ranks: how many there are.
        flipped: a byte of the last tensor is another one.
        nan: one tensor has values that are not finite.
    """
    names = share_of(seen.headers, rank, ranks)
    prints = fingerprints(seen, content)
    if flipped:
        prints[max(prints)] = "f" * 16
    manifest = seen.manifest
    differs = manifest is None or any(manifest.fingerprints.get(name) != prints[name] for name in names)
    fault = "another fingerprint" if differs else "non-finite values" if nan else ""
    digest = proof_digest(prints, names)
    return RankProof(rank=rank, ranks=ranks, signature=seen.signature, tensors=len(names), digest=digest, fault=fault)


def beside(evidence: Evidence) -> Evidence:
    """The evidence of one who reads only the files beside the weights."""
    seen = evidence.structure
    if evidence.contents is None or seen is None or seen.manifest is None:
        return evidence
    named = {name: file.digest for name, file in seen.manifest.files.items()}
    return replace(evidence, contents=Contents(named, ()))
