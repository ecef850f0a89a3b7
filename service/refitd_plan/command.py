"""`refitd plan`: how weights get from trainer to engines, and whether both fit, before anything is started."""

from collections.abc import Iterator, Sequence
from inspect import Parameter
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType
from rich.markup import escape
from rich.text import Text

from refitd.cli.options import Json
from refitd.cli.output import ExitCode, speaking
from refitd.cli.render import Table, sentence
from refitd.cli.serve import option, takes
from refitd_plan.job import DEFAULTS
from refitd_plan.plan import Plan, PlannedMemory, PlannedProcess, TransportOption


def shown(plan: Plan) -> Iterator[RenderableType]:
    yield from _choice(plan)
    yield _ways(plan.ways)
    yield sentence(
        "\nUntil engines answer by the new weights, the trainer is held and an engine is paused. The times are not "
        f"this job's: they were measured with {plan.costs_of}.",
        "dim",
    )
    if plan.memory is not None:
        yield from _memory(plan.memory)
    yield from _settings(plan)
    yield sentence("\nAssumed", "bold")
    yield from (sentence(f"  - {assumption}") for assumption in plan.assumptions)


def _choice(plan: Plan) -> Iterator[RenderableType]:
    yield Text.assemble(("Transport: ", "bold"), (plan.transport, "bold green"))
    yield sentence(f"  {plan.reason}")
    yield ""


def _ways(ways: Sequence[TransportOption]) -> Table:
    figures = ("ANSWERED", "HELD", "PAUSED")
    table = Table("", "TRANSPORT", *figures, right=figures, words="POSSIBLE")
    for way in ways:
        mark = Text("→", style="green") if way.chosen else Text("")
        possible = Text("yes") if way.hinders is None else sentence(f"no: {way.hinders}", "dim")
        table.add_row(mark, way.transport, *(f"{each:,} ms" for each in way.costs_ms.values()), words=possible)
    return table


def _memory(memory: PlannedMemory) -> Iterator[RenderableType]:
    verdict = Text("fits", style="bold green") if memory.fits else Text("does not fit", style="bold red")
    yield Text.assemble(("\nMemory: ", "bold"), verdict, "  (GiB at the peak)")
    yield from (sentence(f"  {fault}", "red") for fault in memory.faults)
    yield _processes(memory.processes)
    if memory.kv_tokens < memory.kv_wanted:
        yield sentence(
            f"  A KV cache holds {max(0, memory.kv_tokens)} tokens; all requests at their longest have "
            f"{memory.kv_wanted}: some of them wait.",
            "yellow",
        )
    there = "" if memory.host_has is None else f", of {memory.host_has:g}"
    yield sentence(f"  A root on tmpfs would take {memory.host:.1f} GiB of host memory{there}.", "dim")
    if not memory.fits:
        yield from _changes(memory)


def _changes(memory: PlannedMemory) -> Iterator[RenderableType]:
    if memory.changes is None:
        yield sentence("\nNo set of the changes that refitd knows makes it fit.", "bold red")
        yield sentence(
            "  Give it more or larger GPUs, cut the model over more of them, keep less for the optimizer (--optimizer "
            "adamw8bit, --precision bf16), or train adapters alone (--lora-rank)."
        )
        return
    yield sentence("\nIt fits with", "bold")
    table = Table("", "SETTING", "VALUE", "SAVES", right={"SAVES"}, words="COSTS")
    for number, change in enumerate(memory.changes, 1):
        value = str(change.value).lower() if isinstance(change.value, bool) else str(change.value)
        table.add_row(f"{number}.", change.setting, value, f"{change.saves:.1f}", words=change.costs)
    yield table
    yield _processes(memory.after)


def _processes(processes: Sequence[PlannedProcess]) -> Table:
    """One column for processes that differ in their rank and GPU alone."""
    kinds = groupby(processes, key=lambda process: (process.process.partition(" rank ")[0], process.parts))
    columns = [list(alike) for _, alike in kinds]
    titles = [_title(same) for same in columns]
    table = Table("", *titles, right=titles)
    table.add_row("on GPU", *(_gpus(same) for same in columns))
    for name in dict.fromkeys(name for process in processes for name in process.parts):
        sizes = (same[0].parts.get(name) for same in columns)
        table.add_row(name, *("" if size is None else f"{size:.2f}" for size in sizes))
    table.add_row(*(Text(each, "bold") for each in ("at the peak", *(f"{same[0].total:.1f}" for same in columns))))
    return table


def _title(same: Sequence[PlannedProcess]) -> str:
    first, last = same[0].process, same[-1].process.rpartition(" ")[2]
    return first if len(same) == 1 else f"{first}-{last}"


def _gpus(same: Sequence[PlannedProcess]) -> str:
    return str(same[0].gpu) if len(same) == 1 else f"{same[0].gpu}-{same[-1].gpu}"


def _settings(plan: Plan) -> Iterator[RenderableType]:
    yield sentence("\nEnvironment", "bold")
    for whose, variables in plan.environment.items():
        if variables:
            yield sentence(f"  # {whose}")
            yield from (sentence(f"  export {name}={value}") for name, value in sorted(variables.items()))
    yield from (sentence(f"  # {line}") for line in plan.advice)
    yield sentence("refitd", "bold")
    yield sentence("  refitd serve --root DIR --engine URL --base-model MODEL")
    yield sentence("Trainer", "bold")
    call = f"publisher.publish(model, step=step, transport={plan.transport!r})"
    yield sentence(f"  {call}  # of several ranks on each, with WeightPublisher(..., ranks='all')")


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
    from refitd_plan.planner import plan as made

    with speaking(json=json) as out:
        found = made(**{name: value for name, value in given.items() if value is not None})
        out.show(found, *shown(found))
        if found.memory is not None and not found.memory.fits:
            raise typer.Exit(ExitCode.FAILED)
