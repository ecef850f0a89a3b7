"""`python killed_train.py TENSORS TRAIN WORD…`: a trainer that is killed when it has broadcast so many tensors.

It runs in AReaL's environment, as `examples/areal/train.py`, which TRAIN is the path of, with its words.
"""

import os
import runpy
import signal
import sys
from typing import Any

import torch.distributed

dist: Any = torch.distributed
broadcast, left = dist.broadcast, int(sys.argv[1])


def counted(*args: Any, **options: Any) -> Any:
    """Broadcast, or be killed."""
    global left  # noqa: PLW0603 - the trainer calls a function of a module
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return broadcast(*args, **options)


dist.broadcast = counted
del sys.argv[:2]
runpy.run_path(sys.argv[0], run_name="__main__")
