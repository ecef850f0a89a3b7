"""How a plan looks to people. Pure: a plan in, Rich renderables out."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from refitd.cli.render import sentence
from refitd_plan.plan import Plan, PlannedMemory, PlannedProcess, TransportOption


def shown(plan: Plan) -> Iterator[RenderableType]:
    """The plan, from the choice to the assumptions."""
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
    yield Text.assemble(("Transport: ", "bold"), (plan.transport, "bold green"), f"  (rule {plan.rule})")
    yield sentence(f"  {plan.reason}")
    yield sentence(f"  The update group of a broadcast would have {plan.update_group} ranks.", "dim")
    if plan.meanwhile is not None:
        why = next(way.left_to_trainer for way in plan.ways if way.chosen)
        yield sentence(
            f"  refitd leaves this broadcast to the trainer: {why}. Of what refitd does itself, {plan.meanwhile} is "
            "the best here: set that up, or make the broadcast in the trainer.",
            "yellow",
        )
    yield ""


def _ways(ways: Sequence[TransportOption]) -> Table:
    table = _table("", "TRANSPORT", "POSSIBLE", "BY REFITD", "ANSWERED", "HELD", "PAUSED")
    for way in ways:
        mark = Text("→", style="green") if way.chosen else Text("")
        verdict = "maybe" if way.maybe else "no"
        possible = Text("yes") if way.hinders is None else sentence(f"{verdict}: {way.hinders}", "dim")
        figures = (f"{figure:,} ms" for figure in way.costs_ms.values())
        table.add_row(mark, way.transport, possible, "yes" if way.carried_out else "no", *figures)
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
    table = _table("", "SETTING", "VALUE", "SAVES", "COSTS")
    for number, change in enumerate(memory.changes, 1):
        value = str(change.value).lower() if isinstance(change.value, bool) else str(change.value)
        table.add_row(f"{number}.", change.setting, value, f"{change.saves:.1f}", change.costs)
    yield table
    yield _processes(memory.after)


def _processes(processes: Sequence[PlannedProcess]) -> Table:
    """One column for processes that differ in their rank and GPU alone."""
    kinds = groupby(processes, key=lambda process: (process.process.partition(" rank ")[0], process.parts))
    columns = [list(alike) for _, alike in kinds]
    table = _table("", *(_title(same) for same in columns))
    table.add_row("on GPU", *(_gpus(same) for same in columns))
    for name in dict.fromkeys(name for process in processes for name in process.parts):
        sizes = (same[0].parts.get(name) for same in columns)
        table.add_row(name, *("" if size is None else f"{size:.2f}" for size in sizes))
    table.add_row("at the peak", *(f"{same[0].total:.1f}" for same in columns), style="bold")
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
    if plan.meanwhile is not None or any(way.chosen and way.carried_out for way in plan.ways):
        how = (plan.meanwhile or plan.transport).removeprefix("disk+")  # as `publish` calls them
        yield sentence("refitd", "bold")
        yield sentence("  refitd serve --root DIR --engine URL --base-model MODEL")
        yield sentence("Trainer", "bold")
        call = f"publisher.publish(model, step=step, transport={how!r})"
        yield sentence(f"  {call}  # of several ranks on each, with WeightPublisher(..., ranks='all')")


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
