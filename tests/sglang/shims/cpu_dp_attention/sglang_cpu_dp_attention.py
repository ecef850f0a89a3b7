"""An SGLang plugin (entry point group sglang.srt.plugins): DP attention with attention in plain PyTorch.

With it SGLang pads the batches of all groups to one size. For the length of an added row it asks the attention's
backend, and only those for AMX and for GPUs answer. A length of 1 reads one row of the cache, and is thrown away.
"""


def register():
    import sys

    import torch

    if torch.cuda.is_available() or "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1
