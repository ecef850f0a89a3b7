"""`refitd plan`: how weights get from trainer to engines, and whether both fit, before anything is started."""

from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from refitd.cli.exits import ExitCode
from refitd.cli.flags import option, takes
from refitd.cli.options import Json
from refitd.cli.output import PAGE_WIDTH, speaking
from refitd_plan.job import DEFAULTS

_MACHINE, _TRAINER, _ENGINE, _ROLLOUTS = "Machine", "Trainer", "Engine", "Rollouts"


def _value(panel: str, name: str, kind: type, metavar: str, text: str, default: Any = None) -> Parameter:
    """An option with a value. The default that `Job` has stands behind its text."""
    of_job = DEFAULTS.get(name)
    shown = text if of_job is None else f"{text} [{of_job}]"
    annotation: Any = kind if default is not None else kind | None
    # Rich would take what stands in brackets for a style, and leave it out.
    flag = typer.Option(
        f"--{name.replace('_', '-')}", metavar=metavar, help=escape(shown), rich_help_panel=panel, show_default=False
    )
    return option(name, Annotated[annotation, flag], default=default)


def _switch(panel: str, name: str, text: str, *, off: str = "", default: bool | None = None) -> Parameter:
    """An option without a value, and one that turns it off."""
    on = f"--{name.replace('_', '-')}"
    flag = typer.Option(
        f"{on}/{off}" if off else on, help=escape(text), rich_help_panel=panel, show_default=default is not None
    )
    return option(name, Annotated[bool | None if default is None else bool, flag], default=default)


_OPTIONS = (
    option(
        "allocation",
        Annotated[
            str | None,
            typer.Argument(
                metavar="[ALLOCATION]", help="An AReaL allocation, such as 'sglang:d1|fsdp:d1'", show_default=False
            ),
        ],
    ),
    _switch(_TRAINER, "areal", "The trainer is AReaL, which hands refitd whole folders", default=False),
    _value(_MACHINE, "engine_gpus", int, "N", "GPUs that generate"),
    _value(_MACHINE, "trainer_gpus", int, "N", "GPUs that train"),
    _value(_MACHINE, "engine_tp", int, "N", "GPUs of one engine [1]", 1),
    _switch(_MACHINE, "shared", "Both get the same GPUs", default=False),
    _value(_MACHINE, "gpus_per_node", int, "N", "GPUs of a node [those of this machine]"),
    _value(_MACHINE, "gpu_memory", float, "GIB", "What programs can have of one GPU [as the driver says]"),
    _value(_MACHINE, "nodes", int, "N", "Nodes of the job [1]"),
    _value(_MACHINE, "host_memory", float, "GIB", "The host's memory, where the root is on a tmpfs"),
    _switch(_MACHINE, "shared_files", "All see the same root", off="--no-shared-files", default=True),
    _switch(
        _ENGINE, "plugin", "refitd is installed in SGLang's environment [if both are in this one]", off="--no-plugin"
    ),
    _value(_TRAINER, "model", Path, "DIR", "The model's folder; without it no memory is planned"),
    _value(_TRAINER, "precision", str, "bf16|mixed|fp32", "How weights and optimizer are kept"),
    _value(_TRAINER, "optimizer", str, "adamw|adamw8bit|sgd", "The optimizer"),
    _value(_TRAINER, "loss", str, "fused|eager", "Whether it copies all logits in fp32"),
    _switch(_TRAINER, "gradient_checkpointing", "Recompute activations", off="--no-gradient-checkpointing"),
    _value(_TRAINER, "micro_batch_tokens", int, "N", "Tokens of the largest micro-batch"),
    _switch(_TRAINER, "reference_model", "Its ranks hold a frozen copy as well, for a KL penalty"),
    _value(_TRAINER, "lora_rank", int, "N", "Train adapters of this rank alone"),
    _switch(_TRAINER, "expandable_segments", "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True is set"),
    _value(_ENGINE, "mem_fraction_static", float, "SHARE", "SGLang's [what it chooses by the GPU's size]"),
    _value(_ENGINE, "context_length", int, "N", "SGLang's [the model's]"),
    _value(_ENGINE, "running_requests", int, "N", "Most requests at a time of one engine"),
    _value(_ROLLOUTS, "batch_size", int, "N", "Prompts of a step"),
    _value(_ROLLOUTS, "samples", int, "N", "Answers to each prompt"),
    _value(_ROLLOUTS, "prompt_tokens", int, "N", "Longest prompt"),
    _value(_ROLLOUTS, "max_new_tokens", int, "N", "Longest answer"),
    _value(_ROLLOUTS, "concurrent_rollouts", int, "N", "Prompts in work at a time"),
)


@takes(*_OPTIONS, option("json", Json, default=False))
def plan(**given: Any) -> None:
    """Plan before the job starts: which way the weights go and why, whether trainer and engines fit on their GPUs, and
    the smallest changes that make them fit.

    ALLOCATION is an AReaL string of 2025 (sglang.d4p1t1+d2p1t1) or of today (sglang:d4|fsdp:d4); --engine-gpus and
    --trainer-gpus say the same in numbers. GPUs are read from this machine, unless they are given. What is not given
    is assumed, and listed. Ends with 0 where it fits, or no model was given, and with 1 where it does not.

    \b
    refitd plan sglang.d1p1t1+d1p1t1 --gpus-per-node 1 --gpu-memory 44.42 --model /models/qwen2.5-0.5b
    refitd plan 'sglang:d4t2+fsdp:d8' --model /models/qwen3-8b --precision mixed --gradient-checkpointing
    refitd plan --engine-gpus 4 --trainer-gpus 4 --gpus-per-node 8 --json | jq '{transport, reason}'
    """
    json = bool(given.pop("json"))
    # Here, because only this command needs them.
    from refitd.cli.plan_shown import shown
    from refitd_client import plan as made

    with speaking(json=json) as out:
        found = made(**{name: value for name, value in given.items() if value is not None})
        out.show(found, *shown(found), width=PAGE_WIDTH)
        if found.memory is not None and not found.memory.fits:
            raise typer.Exit(ExitCode.FAILED)
