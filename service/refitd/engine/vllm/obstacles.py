"""What is in the way of updates of a vLLM server, each with the flag or variable that ends it. Pure."""

from collections.abc import Iterator

from refitd.engine.port import Obstacle
from refitd.engine.vllm.info import Capabilities

EXTENSION = "refitd_vllm."  # how the classes begin with which refitd extends vLLM's workers
INSIDE = (
    "install this very refitd in the server's environment, and start vLLM with --worker-extension-cls "
    "refitd_vllm.Worker, or with REFITD_VLLM_ROOT set to the root as the server sees it"
)


def obstacles(can: Capabilities, *, plugged: bool, several_ranks: bool) -> Iterator[Obstacle]:
    """What is in the way, the worst first.

    Args:
        can: what the server can do.
        plugged: whether refitd's extension loads it.
        several_ranks: whether the operator allows several processes that hold weights without the extension.
    """
    if can.replicas > 1:
        text = f"it has {can.replicas} data-parallel replicas behind one address"
        yield Obstacle(text=text, fix="start a server for each of them, without --data-parallel-size")
    if can.keeps_prefixes is not None:
        text = f"its {can.keeps_prefixes} keeps prefixes that vLLM does not clear: they would outlive the weights"
        fix = "start it with another KV connector (OffloadingConnector, MooncakeStoreConnector) or with none"
        yield Obstacle(text=text, fix=fix)
    if not plugged:
        yield from _of_stock(can, several_ranks=several_ranks)
    if can.sleeps:
        text = "it can be put to sleep (--enable-sleep-mode), and is left alone while it is asleep or paused by another"
        yield Obstacle(text=text, fix="wake it up (POST /wake_up) before versions are published", blocks=False)


def _of_stock(can: Capabilities, *, several_ranks: bool) -> Iterator[Obstacle]:
    if can.moves_experts:
        text = "it moves experts between its processes (--enable-eplb), which a reload does not follow"
        yield Obstacle(text=text, fix="start it without --enable-eplb")
    if can.packs_experts:
        text = (
            "it computes on a CPU, where vLLM packs the experts when it starts and not after a reload: it would answer "
            "200 and serve garbage"
        )
        yield Obstacle(text=text, fix="start it anew on the version")
    if can.stages > 1:
        text = f"it has {can.stages} pipeline stages, and refitd does not update those"
        yield Obstacle(text=text, fix="start it with --tensor-parallel-size in place of --pipeline-parallel-size")
    elif can.ranks > 1 and can.replicas == 1 and not several_ranks:
        text = (
            f"{can.ranks} processes hold its weights, and after one failure vLLM takes their answers for those of "
            "other calls, so a mixture can look like a success"
        )
        fix = f"start one process, or {INSIDE}, or give the service --vllm-stock-ranks"
        yield Obstacle(text=text, fix=fix)
    if can.draft:
        text = "vLLM's reload leaves its draft model as it is: answers stay right, and fewer proposals are taken"
        yield Obstacle(text=text, fix="start it without --speculative-config", blocks=False)


def lacking_for_adapters(can: Capabilities, url: str) -> Obstacle | None:
    """What a server lacks to load adapters at run time; None where it lacks nothing. `url`: of the server."""
    if not can.lora:
        fix = "start vLLM with --enable-lora"
        return Obstacle(text=f"{url} serves no adapters: {fix}", fix=fix)
    if not can.loads_lora:
        fix = "start vLLM with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"
        return Obstacle(text=f"{url} loads no adapters while it runs: {fix}", fix=fix)
    return None


def adapter_obstacles(can: Capabilities, keep: int, *, several_ranks: bool) -> Iterator[Obstacle]:
    """What is in the way of updates of adapters, the worst first.

    Args:
        can: what the server can do.
        keep: how many versions of an adapter stay loaded.
        several_ranks: as for `obstacles`.
    """
    yield from obstacles(can, plugged=False, several_ranks=several_ranks)
    if can.cached_loras < keep:
        text = (
            f"it holds {can.cached_loras} of the {keep} adapters that stay loaded in memory, and reads any other from "
            "its folder when a request names it"
        )
        yield Obstacle(text=text, fix=f"start it with --max-cpu-loras {keep + 1} or more", blocks=False)


def stock_reason(can: Capabilities, found: str | None, unopened: str | None, *, opens: bool) -> str | None:
    """Why its loads are vLLM's own.

    Args:
        can: what the server can do.
        found: what the search for refitd's ranks says; None where they were found, or not searched for.
        unopened: why the extension has not opened its channel, as far as it was asked.
        opens: whether the asker has a channel opened that is not open: the service does, commands do not.
    """
    if found is None or not (can.extension or "").startswith(EXTENSION):
        return found
    later = "; the service has its channel opened when it first reaches the server"
    if opens:
        later = "" if unopened is None else f"; its channel was not opened: {unopened}"
    return f"{found}, though vLLM was started with --worker-extension-cls {can.extension}{later}"
