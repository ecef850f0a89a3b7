"""`refitd webhooks`: the messages that were sent and those that wait; and a trial of a receiver."""

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from refitd.cli.exits import ExitCode
from refitd.cli.options import Json, TokenFile, Url, connect
from refitd.cli.output import Output, speaking
from refitd.cli.render import BAD, BUSY, GOOD, cell, sentence, when
from refitd.cli.table import Table
from refitd_client.contract.history import Delivery
from refitd_client.contract.states import DeliveryState

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
    """List webhooks: each message, its state, and why a receiver has not taken it.

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
            out.show(page, deliveries_table(page.items))


def _try(out: Output, to: str, secret_file: Path | None) -> None:
    # Here, because only this needs the sender.
    from refitd.clock import SystemClock
    from refitd.observe.webhooks.delivery_task import SignedPost, place_of
    from refitd.observe.webhooks.rules import read_secrets
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
    out.show(document, sentence(f"{place_of(to)} {told}"))
    if not taken:
        raise typer.Exit(ExitCode.FAILED)


_STYLES: Mapping[DeliveryState, str] = {
    DeliveryState.WAITING: BUSY,
    DeliveryState.DELIVERED: GOOD,
    DeliveryState.GIVEN_UP: BAD,
}


def deliveries_table(deliveries: Iterable[Delivery]) -> Table:
    """Webhooks, one a line."""
    table = Table("WHEN", "WHAT", "ABOUT", "TO", "STATE", "TRIES", right={"TRIES"}, words="WHY")
    for each in deliveries:
        table.add_row(
            when(each.created_at),
            cell(each.topic),
            cell(each.about),
            cell(each.to),
            Text(each.state, style=_STYLES[each.state]),
            str(each.tries),
            words=cell(each.reason),
        )
    return table
