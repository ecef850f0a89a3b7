"""The words that settings of a job are said in: how weights are kept, which optimizer, which loss, which attention."""

from enum import StrEnum


class Precision(StrEnum):
    """How the trainer keeps its weights. Bytes a parameter: see `trainer.py`."""

    BF16 = "bf16"  # weights, gradients and moments in bf16
    MIXED = "mixed"  # bf16 weights and gradients; master weights and moments in fp32
    FP32 = "fp32"  # everything in fp32


class Optimizer(StrEnum):
    """What it keeps a parameter: two moments, two of 8 bits, or nothing."""

    ADAMW = "adamw"
    ADAMW_8BIT = "adamw8bit"
    SGD = "sgd"


class Loss(StrEnum):
    """How the loss treats the logits: chunked or fused, or in fp32 all at once."""

    FUSED = "fused"
    EAGER = "eager"


class AttentionBackend(StrEnum):
    """SGLang's, as far as it matters for memory."""

    FLASHINFER = "flashinfer"
    FA3 = "fa3"
    TRITON = "triton"
