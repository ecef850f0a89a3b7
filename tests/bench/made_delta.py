"""A trainer's step on a GPU, written as a delta by hand: which elements change is drawn, and so is known."""

from pathlib import Path
from typing import Any

import torch

from refitd_client.contract.manifest import DeltaFacts
from refitd_client.contract.naming import DELTA_NAME, Order, version_folder, version_id
from refitd_client.contract.states import Kind
from refitd_client.delta import Change, Delta, encode, index_type
from refitd_client.fingerprint import fingerprints, to_text
from refitd_client.fingerprint.device import flat_bits
from support.forged import sign

RUN = "bench"
Weights = dict[str, Any]


def write_delta(root: Path, step: int, base: int, weights: Weights, share: float, prints: dict[str, int]) -> Path:
    """Change a share of all elements, in place and on the GPU, and publish what changed. `prints` follows."""
    changes: dict[str, Change] = {}
    for name, tensor in weights.items():
        bits = flat_bits(tensor)
        at = (torch.rand(bits.numel(), device=bits.device) < share).nonzero().reshape(-1)
        if not at.numel():
            continue
        bits[at] = bits[at] ^ 1
        before, prints[name] = prints[name], fingerprints([tensor])[0]
        changes[name] = Change(
            dtype={torch.bfloat16: "BF16", torch.float32: "F32"}[tensor.dtype],
            shape=tuple(tensor.shape),
            indices=at.cpu().numpy().astype(index_type(bits.numel())),
            values=bits[at].cpu().numpy().view(f"u{bits.element_size()}"),
            base=before,
            result=prints[name],
        )
    folder = root / RUN / version_folder(Order(1, step))
    folder.mkdir(parents=True)
    made = Delta(base=version_id(RUN, Order(1, base)), version=version_id(RUN, Order(1, step)), changes=changes)
    (folder / DELTA_NAME).write_bytes(encode(made).to_bytes())
    facts = DeltaFacts(
        file=DELTA_NAME,
        encoding="flat",
        compression="none",
        tensors=len(changes),
        changed=made.changed,
        elements=sum(tensor.numel() for tensor in weights.values()),
    )
    texts = {name: to_text(number) for name, number in prints.items()}
    sign(folder, RUN, step, fingerprints=texts, kind=Kind.DELTA, base=made.base, delta=facts)
    return folder
