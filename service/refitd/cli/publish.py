"""`refitd publish`: a checkpoint in a folder becomes a version."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from refitd.cli import render
from refitd.cli.options import Json, Timeout, TokenFile, Url
from refitd.cli.output import Output, bar, connect, speaking
from refitd.cli.render import span
from refitd.cli.wait import say_if_paused, wait_for
from refitd_client.contract.states import WaitOutcome
from refitd_client.contract.stores import scheme_of
from refitd_client.contract.wire import WaitResult
from refitd_client.errors import RefitError, StepConflictError
from refitd_client.http.client import RefitClient
from refitd_client.http.connection import connect_to
from refitd_client.http.exchange import RetryPolicy, judge
from refitd_client.publish.options import PublishOptions
from refitd_client.publish.publication import Publication
from refitd_client.publisher import WeightPublisher

Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="A checkpoint in safetensors, as save_pretrained writes it")
]
Root = Annotated[
    Path, typer.Option("--root", metavar="DIR", envvar="REFITD_ROOT", help="Folder that the service watches")
]
Run = Annotated[str, typer.Option("--run", metavar="RUN", envvar="REFITD_RUN", help="The run, such as exp/trial")]
Step = Annotated[int, typer.Option("--step", metavar="N", min=0, help="The trainer's step")]
BaseModel = Annotated[
    Path | None,
    typer.Option(
        "--base-model", metavar="DIR", help="Model whose configuration and tokenizer files go into the version"
    ),
]
Metadata = Annotated[
    list[str] | None,
    typer.Option("--metadata", metavar="KEY=VALUE", help="A text to keep with the version; repeatable"),
]
NewGeneration = Annotated[
    bool,
    typer.Option("--new-generation", help="The step may be one that was published before: the run begins anew there"),
]
AllowMissing = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-missing",
        metavar="PATTERN",
        help="Names of tensors of the engines' model that the checkpoint may lack, such as 'mtp.*'; repeatable",
    ),
]
AllowExtra = Annotated[
    bool, typer.Option("--allow-extra", help="The checkpoint may have tensors that the engines' model lacks")
]


class Which(StrEnum):
    """The engines that the service brings to a run which none follows."""

    MINE = "mine"


Engines = Annotated[
    Which | None,
    typer.Option(
        "--engines", help="While no engine follows the run, bring it those that follow no run or a closed one"
    ),
]
Wait = Annotated[bool, typer.Option("--wait", help="Return when engines serve it")]


def publish(
    folder: Folder,
    root: Root,
    run: Run,
    step: Step,
    base_model: BaseModel = None,
    metadata: Metadata = None,
    allow_missing: AllowMissing = None,
    allow_extra: AllowExtra = False,
    new_generation: NewGeneration = False,
    engines: Engines = None,
    wait: Wait = False,
    timeout: Timeout = 300.0,
    url: Url = None,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """Publish a checkpoint: copy it whole into the root, commit it, and tell the service.

    The version is either complete and synced, or absent, even if the command is killed. If the service is down, the
    version is published all the same, and the service finds it when it is back. --timeout is for --wait.

    \b
    refitd publish out/checkpoint-123 --root /shared/weights --run exp/trial --step 123
    refitd publish out/checkpoint-123 --root /shared/weights --run exp/trial --step 123 --wait --timeout 600
    """
    with speaking(json=json) as out:
        if scheme_of(str(root)) is not None:
            raise ValueError(
                "--root is a folder, and this looks like a URL: the service there can push to an object store "
                "('refitd serve --push'), and a WeightPublisher of the SDK publishes into one"
            )
        if not root.is_dir():  # a trainer may start before the service and makes it; at a shell it is a slip
            raise ValueError(
                f"--root {root} is no folder: it is the one that the service watches ('refitd serve --root'); "
                "make it first if you want it there"
            )
        service = connect_to(url, token_file=token_file)
        # This command prints what the library would log.
        logging.getLogger("refitd_client").addHandler(logging.NullHandler())
        with (
            WeightPublisher(
                root,
                run,
                service.url,
                options=PublishOptions(
                    base_model=base_model,
                    token=service.token,
                    token_file=service.token_file,
                    engines=None if engines is None else "mine",
                ),
            ) as publisher,
            bar(out, "writing") as shown,
        ):
            # A trainer that restarts wants a new generation; at a shell it may be a slip, and engines would follow it.
            if (begins := publisher.begins(step)) is not None and not new_generation:
                raise StepConflictError(f"nothing is published: {begins}, if you say --new-generation")
            publication = publisher.publish(
                folder,
                step=step,
                metadata=_pairs(metadata or ()),
                allow_missing=allow_missing or (),
                allow_extra=allow_extra,
                progress=None if shown is None else lambda progress: shown(progress.written, progress.total),
            )
        _remark(out, publication, root)
        served = _wait(out, publication, timeout, connect(url, token_file, RetryPolicy())) if wait else None
        error = publication.notice_error
        answer = {
            "id": publication.version_id,
            "run": publication.run,
            "generation": publication.generation,
            "step": publication.step,
            "path": str(publication.path),
            "bytes": publication.bytes,
            "digest": publication.digest,
            "timings": publication.timings,
            "notice_error": None if error is None else str(error),
            "outcome": None if served is None else served.outcome,
        }
        out.show(answer, *_lines(publication, served))


def _pairs(texts: Sequence[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in texts]
    for key, equals, _ in pairs:
        if not key or not equals:
            raise ValueError(f"--metadata {key!r} is not of the form KEY=VALUE")
    return {key: value for key, _, value in pairs}


def _remark(out: Output, publication: Publication, root: Path) -> None:
    if publication.begun is not None:
        out.remark(publication.begun)
    if publication.notice_error is not None:
        out.remark(
            f"{publication.version_id} is written to {publication.path}, and the service was not told "
            f"({publication.notice_error}); one that watches {root} finds the version by itself when it looks"
        )


def _wait(out: Output, publication: Publication, timeout: float, client: RefitClient) -> WaitResult:
    with client:
        with suppress(RefitError):  # the wait itself says why the service does not answer
            say_if_paused(out, client, publication.run)
        result = wait_for(client, publication.version_id, "served", timeout, out)
    judge(result, timeout)
    return result


def _lines(publication: Publication, served: WaitResult | None) -> list[render.Text]:
    took = span(publication.notice.publish_ms or 0.0)
    lines = [f"{publication.version_id}: {render.size(publication.bytes)} in {took}, {publication.path}"]
    if served is not None:
        lines.append(f"{publication.version_id} {_ended(served)}.")
    return [render.sentence(line) for line in lines]


def _ended(served: WaitResult) -> str:
    """How the wait ended; where engines do not have the version, which."""
    lacks = served.outcome is WaitOutcome.SERVED and not all(engine.serves for engine in served.version.engines)
    return render.served_by(served.version) if lacks else f"is {served.outcome}"
