"""Blocks that go through a group in turn, as a sender's and a receiver's scripts have them."""

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from refitd_client.transport.membership import BroadcastGroup, WaitLimit
from refitd_client.transport.script import IN_FLIGHT


def broadcast(group: BroadcastGroup, blocks: Iterable[torch.Tensor], waiting: WaitLimit) -> None:
    """Send blocks over Gloo, or receive into them."""
    under_way: deque[Any] = deque()
    for block in blocks:
        if len(under_way) == IN_FLIGHT["gloo"]:
            group.end(under_way.popleft(), waiting)
        under_way.append(group.begin(block))
    while under_way:
        group.end(under_way.popleft(), waiting)
