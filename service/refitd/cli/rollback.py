"""`refitd rollback`: what it would do, the question, and doing it."""

from typing import Annotated

import typer

from refitd.cli import render
from refitd.cli.options import RunArgument, Yes, calls_service
from refitd.cli.output import Output, agree
from refitd.text import listed
from refitd_client.contract.wire import RollbackPlan
from refitd_client.http.client import RefitClient

To = Annotated[
    str | None,
    typer.Option(
        "--to", metavar="ID", help="The version to go to, or its step; else the last good one before the current"
    ),
]
_BARS = "this bars versions for good"
_OR_TO = "say --yes, and --to ID to be sure where it goes"


@calls_service
def rollback(out: Output, client: RefitClient, run: RunArgument, to: To = None, yes: Yes = False) -> None:
    """Bring a run's engines back to an earlier good version.

    Says first from which version to which it goes, and asks. Said again, it goes back one more. What is newer is barred
    for good, and collection deletes its files, but for what is pinned and the newest on disk. The way forward is to
    publish anew: the trainer's next step is loaded as usual, and so is the same step in a new generation: begun with
    'refitd publish --new-generation', or by a publisher of the SDK that is opened anew. A host that follows refuses it:
    say it to the hub.

    \b
    refitd rollback exp/trial
    refitd rollback exp/trial --to 120
    refitd rollback exp/trial --to exp~trial~v000120 --yes
    """
    plan = client.rollback_plan(run, to)
    if not yes:
        shown = (render.sentence(told) for told in what_it_does(plan))
        agree(out, *shown, question="Roll back?", does=_BARS, say=_OR_TO)
    version = client.rollback(run, plan.goal)  # not one further back, even if another rollback came first
    did = f"{plan.run} rolls back to {version.id} (step {version.step}). What is newer is barred for good."
    out.show(version, *(render.sentence(told) for told in [did, *_unknown(plan), *_later(plan)]))


def what_it_does(plan: RollbackPlan) -> list[str]:
    """What a rollback does, in sentences for the question."""
    way = f"{plan.run} goes from {plan.leaves} back to {plan.goal}."
    if not plan.barred:
        nothing = "" if plan.unknown else " Nothing newer is left to bar."
        return [f"{way}{nothing}", *_unknown(plan), *_later(plan)]
    whose = "its" if len(plan.barred) == 1 else "their"
    return [
        way,
        f"Barred for good: {listed(plan.barred)}. No engine goes there again, and collection deletes {whose} files, "
        "but for what is pinned and the newest on disk.",
        "To go forward again, publish anew: the next step, or the same one with 'refitd publish --new-generation' "
        "(in the SDK: by a publisher that is opened anew).",
        *_unknown(plan),
        *_later(plan),
    ]


def _unknown(plan: RollbackPlan) -> list[str]:
    """What hosts have that the service has forgotten, or never knew."""
    if not plan.unknown:
        return []
    return [f"Hosts have {listed(plan.unknown)}, which this service does not know: they go back from there too."]


def _later(plan: RollbackPlan) -> list[str]:
    """Engines that cannot be reached now, which roll back when they are back."""
    if not plan.unreachable:
        return []
    one = len(plan.unreachable) == 1
    verb, later = ("is", "it follows when it is back") if one else ("are", "they follow when they are back")
    return [f"{listed(plan.unreachable)} {verb} UNREACHABLE: {later}."]
