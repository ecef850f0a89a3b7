"""What a server's replies mean, as far as all servers say it alike; each dialect reads what is its own. Pure."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, TypeVar, assert_never

import msgspec

from refitd.engine.fingerprints import by_plugin
from refitd.engine.http import CallFailure, NoReply, Reply
from refitd.engine.port import ChangeCheck
from refitd.text import one_line
from refitd_client.contract.plugin import NEEDS_FULL, NEEDS_LEADER, Answer, UpdateOutcome

FormT = TypeVar("FormT", bound=msgspec.Struct)
# What a server says of itself stands in sentences, in logs and on terminals: a text that fills a page is no answer.
ServerRelease = Annotated[str, msgspec.Meta(max_length=100)]
ServerLabel = Annotated[str, msgspec.Meta(max_length=1000)]
_BROKEN = 500  # this status and those above: the server's own fault, or a proxy's
_KEY_REFUSED = {
    401: "the engine wants a key: set --engine-key-file and --engine-admin-key-file, and name the engine with "
    "--engine or in the engines file (one that the API named is sent no key)",
    403: "the engine does not accept the key: set --engine-admin-key-file to its admin key",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerWords:
    """How sentences speak of a kind of server.

    Attributes:
        name: of the kind; `one` is a server of it, with an article.
        key: who wants which key.
        admin_key: which key opens changes.
        elsewhere: what to do where a route does not exist.
    """

    name: str
    one: str
    key: str
    admin_key: str
    elsewhere: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """It says that it has loaded everything. Where refitd inside it did, it says the version, the fingerprint of what
    it holds, and how it was loaded (docs/plugin.md).
    """

    version: str | None = None
    fingerprint: str | None = None
    how: str = ""


@dataclass(frozen=True, slots=True)
class Untouched:
    """It refused before the first write, or was never called. `vouched`: refitd inside it says so, or has restored all.
    `needs_full` and `led` as in `Refit`.
    """

    reason: str
    reachable: bool = True
    vouched: bool = False
    needs_full: bool = False
    led: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """The load has ended and failed. A good one may save the engine as long as no request runs."""

    reason: str


@dataclass(frozen=True, slots=True)
class Unclear:
    """It is not known what it holds now; nor, where it may be `running`, whether the load has ended."""

    reason: str
    running: bool = False


Loading = Loaded | Untouched | Failed | Unclear


def meaning_of_silence(reply: NoReply) -> Untouched | Unclear:
    """What a load that was not answered did."""
    if reply.lost is CallFailure.NEVER_SENT:
        return Untouched(reply.reason, reachable=False)
    if reply.lost is CallFailure.DIED:
        return Unclear(reply.reason)
    return Unclear(f"{reply.reason}: it may have loaded, in part or in full", running=True)


def meaning_of_answers(answers: Sequence[Answer], ranks: int) -> Loaded | Untouched | Unclear:
    """What a load did that refitd's plugin has carried out. Of all ranks' answers the worst counts.

    A missing answer means unknown contents; ranks that serve different versions leave an engine that serves a mixture.
    `ranks`: how many should have answered.
    """
    answer = _worst(answers, ranks)
    reason = one_line(answer.reason[:500])
    match answer.outcome:
        case UpdateOutcome.SERVED:
            how = "load" if any(each.how == "load" for each in answers) else answer.how
            return Loaded(answer.version, by_plugin([each.contents for each in answers]), how)
        case UpdateOutcome.REFUSED:
            full, led = answer.needs == NEEDS_FULL, answer.needs == NEEDS_LEADER
            return Untouched(f"the engine refused: {reason}", vouched=True, needs_full=full, led=led)
        case UpdateOutcome.RESTORED:
            return Untouched(f"the load failed, and what was there is back: {reason}", vouched=True)
        case UpdateOutcome.UNKNOWN:
            return Unclear(f"the load failed, and what it left behind is not known: {reason}")
        case _:
            assert_never(answer.outcome)


def _worst(answers: Sequence[Answer], ranks: int) -> Answer:
    outcomes = {answer.outcome for answer in answers}
    unknown = next((answer for answer in answers if answer.outcome is UpdateOutcome.UNKNOWN), None)
    if unknown is not None:
        return unknown
    if len(answers) != ranks:
        heard = f"{len(answers)} of its {ranks} data-parallel ranks have answered for the plugin"
        return Answer(outcome=UpdateOutcome.UNKNOWN, reason=heard)
    if outcomes == {UpdateOutcome.SERVED}:
        return answers[0]
    if outcomes <= {UpdateOutcome.REFUSED, UpdateOutcome.RESTORED}:
        return next((each for each in answers if each.outcome is UpdateOutcome.RESTORED), answers[0])
    mixed = next(answer for answer in answers if answer.outcome is not UpdateOutcome.SERVED)
    return Answer(
        outcome=UpdateOutcome.UNKNOWN, reason=f"some of its data-parallel ranks serve it, and not all: {mixed.reason}"
    )


def refused_at_the_door(reply: Reply, words: ServerWords) -> str | None:
    """Why a call changed nothing, by the status alone; None where the server let it in."""
    return (
        f"the address knows no such route: {words.elsewhere}" if reply.has_no_route else _KEY_REFUSED.get(reply.status)
    )


def read_form(reply: Reply | NoReply, form: type[FormT], url: str, path: str, server: str) -> FormT | str:
    """What a server says of itself at a path, or a sentence on why that cannot be said.

    A gateway, a web page or another service that answers is named as such: it is no `server`.
    """
    if isinstance(reply, NoReply):
        return reply.reason
    if reply.is_unauthorised:
        return f"{url} wants a key for {path}, or another one than it got: --engine-key-file holds its --api-key"
    if not reply.ok:
        return f"{url}{path} answered {reply.status}: {reply.short_message}"
    try:
        return reply.read_as(form)
    except msgspec.ValidationError as error:
        return f"{url} is no {server} server: its {path} has another form ({error})"


def read_trial_form(reply: Reply | NoReply, form: type[FormT]) -> FormT | str:
    if isinstance(reply, NoReply):
        return f"no answer to a trial: {reply.reason}"
    if not reply.ok:
        return f"a trial was answered {reply.status}: {reply.short_message}"
    try:
        return reply.read_as(form)
    except msgspec.ValidationError as error:
        return f"the answer to a trial cannot be read: {error}"


def fault_of_scores(scores: Iterable[float], *, are_enough: bool) -> str | None:
    """Why the log-probabilities of a trial's tokens are not in order; None where they are."""
    if not are_enough:
        return "a trial brought no tokens"
    if not all(math.isfinite(score) for score in scores):
        return "a trial brought tokens whose log-probability is no number"
    return None


def way_in(read: Reply | NoReply, words: ServerWords) -> str:
    """What to do about a server that cannot be driven, by its answer to a probe."""
    match read:
        case Reply(is_unauthorised=True):
            return f"give it the key that {words.key}: --engine-key-file names its file"
        case Reply(has_no_route=True):
            return words.elsewhere
        case Reply(status=status) if status >= _BROKEN:
            return "see its log, and that of a proxy before it"
        case Reply():
            return f"name {words.one}, of a release and with settings that refitd can drive"
        case NoReply(lost=CallFailure.NEVER_SENT):
            return "start it, or correct its URL, its key's file or --engine-allow"
        case NoReply():
            return "see its log: something listens there, and does not answer, or has not yet while it loads"


def meaning_of_check(reply: Reply | NoReply, words: ServerWords, call: str, *, opens: bool) -> ChangeCheck:
    """Whether a key opens changes, by the answer to a call that changes nothing. `opens`: whether the answer is that of
    a server that let the call in.
    """
    if isinstance(reply, NoReply):
        return ChangeCheck(fault=reply.reason, advice="see the engine's log: it answers reads and not this")
    if opens:
        return ChangeCheck()
    if reply.is_unauthorised:
        text = f"the key that it got, if any, does not open changes ({reply.status})"
        advice = f"--engine-admin-key-file holds {words.admin_key}"
    elif reply.has_no_route:
        text, advice = f"it does not know {call} ({reply.status})", words.elsewhere
    else:
        text = f"{call} was answered with {reply.status}: {reply.short_message}"
        advice = f"is this {words.name} itself, of a release that refitd knows?"
    return ChangeCheck(fault=text, advice=advice)
