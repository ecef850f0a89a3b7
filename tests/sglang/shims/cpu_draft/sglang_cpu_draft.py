"""An SGLang plugin (entry point group sglang.srt.plugins) that lets a server with a draft model start on a CPU.

Its kernels and its attention backends for drafts need a CPU with AMX, or a GPU. With this the server starts and is
updated, draft model and all. It cannot generate: start it with --skip-server-warmup.
"""


def register():
    import sys

    import torch

    if torch.cuda.is_available() or "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.kernels.ops.kvcache import cache_move
    from sglang.srt.speculative import draft_utils

    cache_move.copy_all_layer_kv_cache_cpu = lambda *args: None
    draft_utils.DraftBackendFactory._create_backend = lambda *args, **kwargs: None
