"""`refitd webhooks`: what was told to whom, and what waits; and whether a receiver takes a message."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from refitd.cli import render
from refitd.cli.exits import ExitCode
from refitd.cli.options import Json, TokenFile, Url, connect
from refitd.cli.output import Output, speaking

Limit = Annotated[int, typer.Option("--limit", metavar="N", min=1, max=500, help="The newest N")]
Test = Annotated[
    str | None,
    typer.Option("--test", metavar="URL", help="List nothing: send this URL one signed message, now and from here"),
]
SecretFile = Annotated[
    Path | None,
    typer.Option(
        "--webhook-secret-file",
        metavar="FILE",
        envvar="REFITD_WEBHOOK_SECRET_FILE",
        help="With --test: file with the secret, as for 'refitd serve'",
    ),
]


def webhooks(
    limit: Limit = 20,
    test: Test = None,
    webhook_secret_file: SecretFile = None,
    url: Url = None,
    token_file: TokenFile = None,
    json: Json = False,
) -> None:
    """List webhooks: what was told, how far it is, and why a receiver has not taken it.

    With --test a receiver is tried, once and without the service: run it where the service runs.

    \b
    refitd webhooks
    refitd webhooks --limit 100 --json
    refitd webhooks --test https://ops.example.com/refitd --webhook-secret-file /run/secrets/webhook
    """
    with speaking(json=json) as out:
        if test is not None:
            _try(out, test, webhook_secret_file)
            return
        with connect(url, token_file) as client:
            page = client.deliveries(limit=limit)
            out.show(page, render.deliveries_table(page.items))


def _try(out: Output, to: str, secret_file: Path | None) -> None:
    # Here, because only this needs the sender.
    from refitd.clock import SystemClock
    from refitd.observe.webhooks.delivery_task import place_of
    from refitd.observe.webhooks.post import SignedPost
    from refitd.observe.webhooks.signature import read_secrets
    from refitd.state.delivery import after_try, trial_message
    from refitd_client.contract.states import DeliveryState

    if not to.startswith(("http://", "https://")):
        raise ValueError(f"--test {to}: a webhook's URL is http:// or https://")
    if secret_file is None:
        raise ValueError("--test needs --webhook-secret-file (REFITD_WEBHOOK_SECRET_FILE): messages are signed")
    read_secrets(secret_file)
    now = SystemClock().now()
    sent = asyncio.run(SignedPost(secret_file)(message := trial_message(to, now)))
    tried, _ = after_try(message, sent, now)
    taken = tried.state is DeliveryState.DELIVERED
    told = "took it" if taken else f"did not take it: {tried.reason}"
    document = {"id": message.id, "to": place_of(to), "taken": taken, "status": sent.status, "reason": tried.reason}
    out.show(document, render.sentence(f"{place_of(to)} {told}"))
    if not taken:
        raise typer.Exit(ExitCode.FAILED)
