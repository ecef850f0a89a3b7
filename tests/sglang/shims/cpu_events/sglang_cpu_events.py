"""An SGLang plugin (entry point group sglang.srt.plugins): CUDA events on a CPU-only torch, over at once.

A prefill server waits for such an event before it sends keys and values, whatever the device.
"""


class CpuEvent:
    """Nothing runs beside the thread that asks, so all that came before is done."""

    def __init__(self, *_, **__):
        pass

    def record(self, stream=None):
        pass

    def wait(self, stream=None):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True


def register():
    import torch

    if torch.cuda.is_available():
        return
    torch.cuda.Event = CpuEvent
    torch.cuda.current_stream = lambda device=None: None
