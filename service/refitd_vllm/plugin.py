"""vLLM's entry point (`vllm.general_plugins`): `refitd = refitd_vllm.plugin:register`, loaded in every process.

It gives vLLM's worker class the methods of `refitd_vllm.Worker`, so that no flag is needed, and has each worker open
the plugin's channel when its model is there.

`Worker` is what `/collective_rpc` calls on each worker (`--worker-extension-cls refitd_vllm.Worker`). Its methods
return and never raise: an exception in one of several workers makes vLLM read the answers of the others as those of the
next call.
"""

import logging
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from refitd_plugin.settings import read_settings

logger = logging.getLogger("refitd_vllm")
_VLLM_SETTINGS = "REFITD_VLLM"  # and what begins with it
_PLUGINS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


class Worker:
    """Mixed into vLLM's worker class. vLLM refuses a class that has a name of its worker's."""

    def refitd_open(self, instance: str = "", root: str = "") -> dict[str, Any]:
        """Open the channel, where that is not done when the model is loaded; why refitd does not load, if so.
        `instance`: the number by which the server names itself (`instance_id` of its configuration). `root`: refitd's
        root as this process sees it, for a server that was started without REFITD_VLLM_ROOT.
        """
        try:
            reason = _opened(self, instance, root)
        except Exception as error:
            return _failed(error)
        return {"ok": reason is None, "reason": reason or ""}

    def refitd_update(self, path: str) -> dict[str, Any]:
        """Carry out an update to the version in a folder; what each rank answers is the engine's answer.

        `message` is what the plugin says, for people and for programs; empty where the update is not the plugin's.
        """
        try:
            return _updated(self, path)
        except Exception as error:
            return _failed(error)


def plugin_of(worker: Any) -> Any:
    """The plugin of a worker, made when it is first asked for. Raises where it cannot be set up."""
    if worker not in _PLUGINS:
        from refitd_plugin.rank_plugin import RankPlugin
        from refitd_vllm.process import VllmProcess

        rank = RankPlugin(VllmProcess(worker), read_settings(_VLLM_SETTINGS))
        if rank.aside is not None:
            logger.warning("refitd stands aside, updates are vLLM's own: %s", rank.aside)
        _PLUGINS[worker] = rank
    return _PLUGINS[worker]


def _opened(worker: Any, instance: str, root: str) -> str | None:
    if not read_settings(_VLLM_SETTINGS).on:
        return f"it is switched off ({_VLLM_SETTINGS}=off)"
    rank = plugin_of(worker)
    rank.process.instance = instance or rank.process.instance
    return rank.open(Path(root)) if root else rank.aside


def _updated(worker: Any, path: str) -> dict[str, Any]:
    from refitd_plugin.memory.offered import is_ours
    from refitd_plugin.port import UpdateCall
    from refitd_vllm.process import undone

    rank = plugin_of(worker)
    if rank.engine is None:
        return {"ok": False, "message": "", "reason": f"the plugin stands aside: {rank.aside}"}
    if not is_ours(path, rank.engine.root):
        return {"ok": False, "message": "", "reason": f"{path} is no version: refitd has not sealed it"}
    process = rank.engine.process
    undone(process.model)  # what a reload of vLLM's own may have left apart
    in_place = process.writes_in_place  # once: it looks at every layer, and generation is paused
    load = partial(process.load, in_place=in_place)
    answer = rank.update(rank.engine, UpdateCall(path, "auto", load, observable=in_place))
    return {"ok": True, "message": answer.message, "reason": ""}


def _failed(error: Exception) -> dict[str, Any]:
    logger.warning("refitd failed in a call", exc_info=error)
    return {"ok": False, "message": "", "reason": f"{type(error).__name__}: {error}"}


_WORKER = ("vllm.v1.worker.gpu_worker", "Worker")  # the CPU's is a subclass


def register() -> None:
    """Extend vLLM's worker, or say once why not. Never raises."""
    try:
        if read_settings(_VLLM_SETTINGS).on:
            extend(getattr(import_module(_WORKER[0]), _WORKER[1]))
    except Exception:
        logger.warning("refitd stands aside: it could not be set up", exc_info=True)


def extend(worker: Any) -> None:
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
