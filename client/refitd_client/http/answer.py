"""An outcome becomes a result or an error: pure. What is not in refitd's form is named as such, with its URL."""

from typing import Any, cast

import msgspec

from refitd_client.contract.wire import Problem
from refitd_client.errors import ServiceError, ServiceUnreachableError, problem_error
from refitd_client.http.retry import Answer, Lost
from refitd_client.http.routes import Call, ResultT

_SHOWN = 120  # characters of a foreign answer that an error quotes


def read_outcome(call: Call[ResultT], outcome: Answer | Lost) -> ResultT:
    """The result of the call.

    Raises:
        ServiceProblemError: the service answered with a problem document, or a proxy wants a login (401, 403).
        ServiceUnreachableError: no answer came, or one that no refitd service gives.
    """
    if isinstance(outcome, Answer) and 200 <= outcome.status < 300:
        return _result(call, outcome)
    raise failure(call, outcome)


def failure(call: Call[Any], outcome: Answer | Lost) -> ServiceError:
    """The error that an outcome other than 2xx stands for."""
    match outcome:
        case Lost():
            perhaps = " after it was sent, so it may have been carried out" if outcome.sent else ""
            return ServiceUnreachableError(f"{call.method} {outcome.url} got no answer{perhaps}: {outcome.reason}")
        case Answer(status=status) if 300 <= status < 400:
            target = outcome.headers.get("location", "elsewhere")
            return ServiceUnreachableError(
                f"{outcome.url} redirects to {target} (HTTP {status}); redirects are not followed, because the token "
                "would go along: give the service's own URL"
            )
        case Answer():
            return _refusal(outcome)


def _refusal(answer: Answer) -> ServiceError:
    try:
        return problem_error(msgspec.json.decode(answer.body, type=Problem))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _foreign_refusal(answer)


def _foreign_refusal(answer: Answer) -> ServiceError:
    told = f"{answer.url} answered HTTP {answer.status}, but not as refitd does: {_excerpt(answer)}"
    if answer.status not in {401, 403}:
        return ServiceUnreachableError(f"{told}; is this refitd's URL, and the proxy before it in order?")
    detail = f"{told}; a proxy before the service seems to want a login"
    return problem_error(Problem(type="about:blank", title="Not authorised", status=answer.status, detail=detail))


def _result(call: Call[ResultT], answer: Answer) -> ResultT:
    if call.result is type(None):
        return cast("ResultT", None)
    try:
        return msgspec.json.decode(answer.body, type=call.result)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ServiceUnreachableError(
            f"{answer.url} answered HTTP {answer.status} in a form that this client does not know ({error}): "
            f"{_excerpt(answer)}; is this refitd's URL, and is the service as new as the client?"
        ) from error


def _excerpt(answer: Answer) -> str:
    text = " ".join(answer.body[: 4 * _SHOWN].decode("utf-8", "replace").split())
    kind = answer.headers.get("content-type", "no content type").partition(";")[0]
    return f"{kind}, {text[:_SHOWN]!r}"
