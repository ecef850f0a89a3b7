"""Ranks of a trainer that lend their parts of a small model's weights, without a publisher and without a service."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from refitd_client import Sharded
from refitd_client.fingerprint.host import MASK
from refitd_client.sharded.export import LentLayout, RankExport
from refitd_client.sharded.holdings import NamingOptions, holdings_of
from refitd_client.sharded.layout import AgreedLayout, lay_out
from refitd_client.sharded.orders import LendOrder, LentReply
from refitd_client.sharded.parts import entries_of, sent_parts
from refitd_client.tensors import casts
from refitd_client.transport.offer import Offer, offer_with


class LendingRank:
    """One rank with its tensors, some of which are parts."""

    def __init__(self, folder: Path, rank: int, tensors: Mapping[str, Any], sharded: Mapping[str, Sharded]) -> None:
        self.rank = rank
        self.export = RankExport(folder, rank, check_finite=True)
        self.holdings = holdings_of(dict(tensors), NamingOptions(casts=casts(None), rename=None), sharded)
        self.claims = [holding.claim for holding in self.holdings.values()]

    def lend(self, agreed: AgreedLayout) -> LentReply:
        parts = sent_parts(agreed.layout.parts[self.rank], self.claims)
        return self.export.lend(LendOrder(task=None, known=0), parts, self.holdings)

    def close(self) -> None:
        self.export.close()


def agreed_on(claims: list[Any]) -> AgreedLayout:
    """What ranks with these claims agree on."""
    layout = lay_out(claims, inventory=lambda: None, max_shard_bytes=None, check_finite=True)
    return AgreedLayout(number=1, claims=claims, layout=layout)


def offer_of_ranks(version: str, agreed: AgreedLayout, replies: Sequence[LentReply]) -> Offer:
    """The offer that rank 0 makes of what all say."""
    lent = LentLayout()
    lent.take(replies)
    layout, line = lent.offer(agreed, replies)
    sums = {entry.name: 0 for entry in entries_of(agreed.layout)}
    for reply in replies:
        for name, (fingerprint, _) in reply.scans.items():
            sums[name] = (sums[name] + fingerprint) & MASK
    return offer_with(layout, version, list(sums.values()), line)


def split(
    weights: Mapping[str, torch.Tensor], dims: Mapping[str, int | None], ranks: int, owners: Mapping[str, int]
) -> list[tuple[dict[str, torch.Tensor], dict[str, Sharded]]]:
    """What each rank has: chunks of a tensor along its dimension; where that is None all of it, or its owner alone."""
    found = list[tuple[dict[str, torch.Tensor], dict[str, Sharded]]]()
    for rank in range(ranks):
        tensors, parts = dict[str, torch.Tensor](), dict[str, Sharded]()
        for name, whole in weights.items():
            dim = dims.get(name)
            if dim is None:
                if owners.get(name, rank) == rank:
                    tensors[name] = whole.clone()
                continue
            chunks = whole.chunk(ranks, dim)
            tensors[name] = (chunks[rank] if rank < len(chunks) else whole.narrow(dim, 0, 0)).contiguous()
            parts[name] = Sharded(dim, rank, ranks, whole.shape[dim])
        found.append((tensors, parts))
    return found
