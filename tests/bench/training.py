"""A trainer's weights, some of which change in each step, as benchmarks of hosts publish them."""

import time

import numpy as np

from refitd_client import WeightPublisher
from refitd_client.contract.states import Kind
from support.checkpoints import Tensors

TENSORS = 16


class Training:
    """`publisher` is set before the first step."""

    publisher: WeightPublisher

    def __init__(self, size: int, changed: float = 0.01) -> None:
        """Have weights of about so many bytes, of whose elements about a share changes in each step."""
        self._changed = changed
        self._random = np.random.default_rng(1)
        shape = (1, size // TENSORS // 4)
        self.weights: Tensors = {
            f"layers.{number:02d}.weight": self._random.random(shape, np.float32) for number in range(TENSORS)
        }
        self.step = 0

    def publish(self, *, delta: bool) -> tuple[float, int]:
        """Train and publish a step; when it was published (monotonic seconds), and its bytes."""
        self.step += 1
        for tensor in self.weights.values():
            at = self._random.integers(0, tensor.size, int(tensor.size * self._changed))
            tensor[0, at] += 1
        done = self.publisher.publish(self.weights, step=self.step, transport="delta" if delta else None)
        if delta and self.step > 1 and done.kind is not Kind.DELTA:
            raise RuntimeError(f"step {self.step} is no delta: {done.why_full}")
        return time.monotonic(), done.bytes
