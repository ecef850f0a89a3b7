"""The checksums that SGLang gives of its parameters (`/weights_checker`), computed from tensors of the trainer.

Read in SGLang 0.5.23: `srt/managers/mm_utils.py` (tensor_hash) and `kernels/ops/memory/gpu_tensor_hash.py`. Of a tensor
in host memory it is the first half of a SHA-256, of one on a GPU a sum of 32-bit hashes of tiles. A release that
computes another one is not believed to hold the version.
"""

import hashlib
from collections.abc import Callable, Sequence

import torch

_MASK = 0xFFFF_FFFF
_MASK64 = 0xFFFF_FFFF_FFFF_FFFF
_TILE = 8192  # words of 32 bits
_TILES_AT_ONCE = 512
_SEED = 0x243F6A88
_SEEDS = ((_SEED, 0x27D4EB2D, 15), (((_SEED * 0x9E3779B1) ^ 0xDEADBEEF) & _MASK, 0x165667B1, 13))


def on_host(parts: Sequence[torch.Tensor]) -> str:
    """The checksum of tensors that lie one after the other in host memory: 16 hex digits."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(_bytes(part).cpu().numpy().data)
    return digest.digest()[:8].hex()


def on_gpu(parts: Sequence[torch.Tensor]) -> str:
    """The checksum of tensors that lie one after the other on a GPU: 16 hex digits. They may be elsewhere here."""
    flat = torch.cat([_bytes(part) for part in parts])
    size = -(-len(flat) // 4)
    if not size:
        return f"{0:016x}"
    words = torch.zeros(size * 4, dtype=torch.uint8, device=flat.device)
    words[: len(flat)] = flat
    words, total = words.view(torch.int32), 0
    for begin in range(0, size, _TILE * _TILES_AT_ONCE):
        some = words[begin : begin + _TILE * _TILES_AT_ONCE].to(torch.int64) & _MASK
        high, low = (_tiles(some, begin, size * 4, *seed) for seed in _SEEDS)
        total += (int(high.sum()) << 32) + int(low.sum())
    return f"{_splitmix(total & _MASK64):016x}"


CHECKSUMS: dict[str, Callable[[Sequence[torch.Tensor]], str]] = {"cpu": on_host, "cuda": on_gpu}
"""How a checksum is computed, by the device that the engine says it has."""


def _tiles(words: torch.Tensor, begin: int, nbytes: int, seed: int, factor: int, turn: int) -> torch.Tensor:
    """The hash of each tile. Products of 32-bit numbers wrap in 64 bits, and their low halves are right."""
    at = torch.arange(begin, begin + len(words), device=words.device) & _MASK
    place = ((at * factor + seed) & _MASK) ^ (((at << turn) | (at >> (32 - turn))) & _MASK)
    mixed = _mix(words ^ place)
    rest = -len(mixed) % _TILE
    sums = torch.nn.functional.pad(mixed, (0, rest)).view(-1, _TILE).sum(1) & _MASK
    return _mix(sums ^ (nbytes & _MASK))


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & _MASK
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


def _splitmix(x: int) -> int:
    x ^= x >> 30
    x = (x * 0xBF58476D1CE4E5B9) & _MASK64
    x ^= x >> 27
    x = (x * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
