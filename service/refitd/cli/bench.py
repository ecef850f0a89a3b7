"""`refitd bench transports`: each way from this trainer's host to a run's engines, tried and timed."""

import re
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.console import RenderableType

from refitd.cli import render
from refitd.cli.options import Json, Timeout, TokenFile, Url, Yes
from refitd.cli.output import Output, agree, speaking
from refitd.cli.table import Table
from refitd.diagnose.sender_ranks import RankSetup, sender_ranks
from refitd.diagnose.transports import (
    TRIED,
    BenchTrainer,
    OneTrainer,
    TransportBench,
    TransportComparison,
    TransportFigures,
    check_place,
    tensors_on,
)
from refitd_client.errors import NotFoundError, RefitError
from refitd_client.http.connection import Connection, connect_to
from refitd_client.http.publisher_client import open_client
from refitd_client.publish.publisher import WeightPublisher
from refitd_client.transport.group.sending import SEND_SECONDS

RUN = "bench/transports"


class Measured(StrEnum):
    """What can be measured."""

    TRANSPORTS = "transports"


What = Annotated[Measured, typer.Argument(metavar="transports", help="What to measure", show_default=False)]
Model = Annotated[Path, typer.Argument(metavar="DIR", help="The engines' model, as save_pretrained writes it")]
Root = Annotated[
    Path, typer.Option("--root", metavar="DIR", envvar="REFITD_ROOT", help="Folder that the service watches")
]
Run = Annotated[
    str,
    typer.Option(
        "--run", metavar="RUN", help="The run to publish to; the default one takes engines that follow no run"
    ),
]
Device = Annotated[
    str | None,
    typer.Option("--device", metavar="DEVICE", help="Where the weights are, such as cuda:0; a GPU if there is one"),
]
Publications = Annotated[int, typer.Option("--publications", metavar="N", min=1, help="How many by each way are timed")]
Between = Annotated[
    float,
    typer.Option(
        "--between", metavar="SECONDS", min=0.0, help="In which a trainer would compute, before each publication"
    ),
]
Ranks = Annotated[
    int,
    typer.Option("--ranks", metavar="N", min=1, help="Try as a trainer of N ranks on this host, and then as one of 1"),
]


def bench(
    what: What,
    folder: Model,
    root: Root,
    run: Run = RUN,
    device: Device = None,
    ranks: Ranks = 1,
    publications: Publications = 5,
    between: Between = 1.0,
    yes: Yes = False,
    timeout: Timeout = 120.0,
    url: Url = None,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Measure on your own machines: 'transports' tries each way from this host to the engines, and says which is the
    fastest.

    Run it where the trainer will run, before it does: it publishes the model's weights again and again, changed in the
    lowest bit of one element in a hundred, by files, as deltas, from memory, over NCCL and over Gloo. Engines load each
    of these versions. The last one has the weights as they are in DIR. A way that cannot work here is named with the
    reason.

    --json has milliseconds: of each publication in answered, held and paused, and their medians in medians_ms.

    With --ranks N the same is done before by N processes on this host, as a trainer of so many ranks publishes
    (ShardedPublisher): each has its rows of each tensor, and a GPU of its own where there are enough.

    The run's steps are used up: in a run that a trainer goes on with, its next step begins a new generation. The
    default run is closed at the end, so that its engines are free again.

    \b
    refitd bench transports /models/base --root /mnt/weights
    refitd bench transports /models/base --root /mnt/weights --run exp/trial --device cuda:1 --yes
    refitd bench transports /models/base --root /mnt/weights --ranks 4
    """
    with speaking(json=json) as out:
        if not root.is_dir():
            raise ValueError(
                f"--root {root} is no folder: it is the one that the service watches ('refitd serve --root')"
            )
        connection = connect_to(url, token_file=token_file)
        check_place(connection, root, takes_engines=run == RUN)
        device = device_here(device, _gpus())
        if run != RUN and not yes and _has_versions(connection, run):
            count = (2 + len(TRIED) * (publications + 1)) * min(ranks, 2)
            agree(
                out,
                render.sentence(f"{run} has versions. Up to {count} more are published, and its engines load each."),
                question="Go on?",
                does=f"this publishes up to {count} versions of {run}, and a trainer's next step begins a generation",
            )
        job = BenchJob(folder=folder, root=root, run=run, connection=connection, device=device)
        times = BenchTimes(publications=publications, between=between, timeout=timeout)
        with _closed(connection, run):
            # One process is the last: it leaves engines on the weights as they are, whatever becomes of ranks.
            of_ranks = None if ranks == 1 else _of_ranks(job, times, ranks, lambda text: _say(out, text))
            found = replace(_of_one(job, times, lambda text: _say(out, text)), of_ranks=of_ranks)
        out.show(found, *shown(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchJob:
    """What is published, and where."""

    folder: Path
    root: Path
    run: str
    connection: Connection
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTimes:
    """How often, with how many seconds between, and within which each."""

    publications: int
    between: float
    timeout: float

    def bench(self, trainer: BenchTrainer, job: BenchJob) -> TransportBench:
        """The bench of a trainer."""
        return TransportBench(
            trainer,
            job.connection,
            job.run,
            publications=self.publications,
            between=self.between,
            timeout=self.timeout,
        )


def _of_one(job: BenchJob, times: BenchTimes, say: Callable[[str], None]) -> TransportComparison:
    connection = job.connection
    with (
        tensors_on(job.folder, job.device) as tensors,
        WeightPublisher(
            job.root,
            job.run,
            connection.service_url,
            token=connection.token,
            token_file=connection.token_file,
            engines="mine" if job.run == RUN else None,
        ) as publisher,
    ):
        return times.bench(OneTrainer(publisher, connection, job.run, tensors), job).compare(job.device, say)


def _of_ranks(job: BenchJob, times: BenchTimes, ranks: int, say: Callable[[str], None]) -> TransportComparison:
    setup = RankSetup(
        folder=job.folder,
        device=job.device,
        root=job.root,
        run=job.run,
        connection=job.connection,
        takes_engines=job.run == RUN,
        ranks=ranks,
        store="",
        timeout=max(times.timeout, SEND_SECONDS),
    )
    say(f"{ranks} ranks begin")
    try:
        with sender_ranks(setup) as trainer:
            return times.bench(trainer, job).compare(job.device, lambda text: say(f"{ranks} ranks: {text}"))
    except RefitError as error:
        figures = [TransportFigures(transport=each, ranks=ranks, reason=str(error)) for each in TRIED]
        return TransportComparison(
            run=job.run,
            device=job.device,
            model_bytes=0,
            engines=[],
            figures=figures,
            fastest=None,
            auto="disk",
            auto_why="files go everywhere",
            ranks=ranks,
        )


def _has_versions(connection: Connection, run: str) -> bool:
    """Ask the service. One that does not answer ends the command: nothing is published into a run unasked."""
    with open_client(connection, try_for=5.0) as client:
        return bool(client.versions(run, limit=1).items)


@contextmanager
def _closed(connection: Connection, run: str) -> Generator[None]:
    """Close the run at the end, if it is the bench's own."""
    try:
        yield
    finally:
        if run == RUN:
            # Where the first version was refused, the service may not know of the run.
            with suppress(NotFoundError), open_client(connection, try_for=5.0) as client:
                client.close_run(run)


def _gpus() -> int:
    import torch  # here, because it takes seconds

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def device_here(asked: str | None, gpus: int) -> str:
    """The device that --device names; by default the first GPU, if there is one.

    Args:
        asked: what was typed.
        gpus: how many torch sees on this host.

    Raises:
        ValueError: there is no such device here; the message says which ones there are.
    """
    here = [*(f"cuda:{number}" for number in range(gpus)), "cpu"]
    device = here[0] if asked is None or (asked == "cuda" and gpus) else asked
    if device in here:
        return device
    named = ("cuda:0" if gpus == 1 else f"cuda:0 to cuda:{gpus - 1}") if gpus else None
    if re.fullmatch(r"cuda(:\d+)?", device) is None:
        raise ValueError(f"--device {asked} names no device: say {'' if named is None else f'{named}, or '}cpu")
    if named is None:
        raise ValueError(f"--device {asked}: torch sees no GPU on this host: say --device cpu")
    raise ValueError(f"--device {asked}: this host has no such GPU: say {named}, or cpu")


def _say(out: Output, text: str) -> None:
    if not out.json:
        out.remark(f"{text} …", style="dim")


def shown(found: TransportComparison) -> list[RenderableType]:
    """The table, and what follows from it."""
    table = Table(
        "TRANSPORT",
        "ANSWERED",
        "TRAINER HELD",
        "ENGINE PAUSED",
        "BYTES",
        right={"ANSWERED", "TRAINER HELD", "ENGINE PAUSED", "BYTES"},
        words="",
    )
    of_ranks = () if found.of_ranks is None else found.of_ranks.figures
    for each in (*found.figures, *of_ranks):
        table.add_row(
            each.transport if each.ranks == 1 else f"{each.transport}, {each.ranks} ranks",
            _spread(each.answered),
            _spread(each.held),
            _spread(each.paused),
            render.size(each.bytes),
            words=each.reason,
        )
    sentences = [*_sentences(found), *(() if found.of_ranks is None else _sentences(found.of_ranks))]
    return [table, *(render.sentence(each) for each in sentences)]


def _spread(values: list[float]) -> str:
    """The median, and the least and the most."""
    if not values:
        return render.NOTHING
    return f"{render.span(median(values))} ({render.span(min(values))} to {render.span(max(values))})"


def _sentences(found: TransportComparison) -> Iterator[str]:
    many = "1 engine" if len(found.engines) == 1 else f"{len(found.engines)} engines"
    if found.ranks == 1:
        yield f"Medians, least and most; {render.size(found.model_bytes)} on {found.device}, {many} of {found.run}."
    else:
        yield f"{found.ranks} ranks, each with its rows ({many}):"
    if found.fastest is None:
        yield "No transport worked."
        return
    ranges = {each.transport: (min(each.answered), max(each.answered)) for each in found.figures if each.answered}
    if found.fastest == found.auto:
        yield f'transport="auto" takes the fastest, {found.auto}: {found.auto_why}.'
    elif found.auto in ranges and ranges[found.auto][0] <= ranges[found.fastest][1]:
        yield (
            f'transport="auto" takes {found.auto}: {found.auto_why}. '
            f"{found.fastest} is no faster by more than what differs from one time to the next."
        )
    else:
        yield (
            f'The fastest is {found.fastest}: publish(…, transport="{found.fastest}"). '
            f'"auto" would take {found.auto}: {found.auto_why}.'
        )
