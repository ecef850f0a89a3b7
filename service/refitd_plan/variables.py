"""What trainer and engine need around them for each way: environment variables, and what no variable does. Pure."""

from collections.abc import Mapping

from refitd_plan.transport import Transport

ENVIRONMENT: Mapping[Transport, Mapping[str, Mapping[str, str]]] = {
    Transport.NCCL: {
        # SGLang sets it for its own processes; a trainer without it joins the group, and its first broadcast fails.
        "trainer": {"NCCL_CUMEM_ENABLE": "0", "NCCL_DEBUG": "WARN"},
        "engine": {"NCCL_CUMEM_ENABLE": "0", "NCCL_DEBUG": "WARN"},
    },
}
_HUB = {"HF_HUB_OFFLINE": "1"}  # a path that is gone must fail, and never be looked for on the hub


def environment(transport: Transport, *, expandable_segments: bool) -> dict[str, dict[str, str]]:
    """The variables that trainer and engine need, by who needs them."""
    of = ENVIRONMENT.get(transport, {})
    trainer = dict(of.get("trainer", {}))
    if expandable_segments:
        trainer["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return {"trainer": trainer, "engine": {**_HUB, **of.get("engine", {})}}


def advice(transport: Transport) -> tuple[str, ...]:
    """What has to be kept to, in sentences."""
    if transport is not Transport.NCCL:
        return ()
    return (
        "load NCCL in the training processes only: a controller that makes no step joins no group and imports none",
        "keep NCCL_DEBUG=INFO out of production: it writes a line for every operation",
    )
