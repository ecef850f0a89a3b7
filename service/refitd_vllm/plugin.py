"""vLLM's entry point (`vllm.general_plugins`): `refitd = refitd_vllm.plugin:register`, loaded in every process.

It gives vLLM's worker class the methods of `refitd_vllm.Worker`, so that no flag is needed, and has each worker open
the plugin's channel when its model is there.
"""

import logging
from functools import wraps
from importlib import import_module
from typing import Any

from refitd_plugin.settings import read_settings
from refitd_vllm.worker import Worker, plugin_of

logger = logging.getLogger("refitd_vllm")
_WORKER = ("vllm.v1.worker.gpu_worker", "Worker")  # the CPU's is a subclass


def register() -> None:
    """Extend vLLM's worker, or say once why not. Never raises."""
    try:
        if read_settings("REFITD_VLLM").on:
            extend(getattr(import_module(_WORKER[0]), _WORKER[1]))
    except Exception:
        logger.warning("refitd stands aside: it could not be set up", exc_info=True)


def extend(worker: Any) -> None:
    """Give a worker class the methods, once."""
    if hasattr(worker, "refitd_update"):
        return
    load = worker.load_model

    @wraps(load)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        load(self, *args, **kwargs)
        try:
            plugin_of(self)
        except Exception:
            logger.warning("refitd could not look at the model", exc_info=True)

    worker.load_model = load_model
    for name in [name for name in vars(Worker) if name.startswith("refitd_")]:
        setattr(worker, name, vars(Worker)[name])
        delattr(Worker, name)  # vLLM refuses an extension that has a name which its worker has by now
