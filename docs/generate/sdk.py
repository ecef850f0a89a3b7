"""The page of the Python SDK, from the public names of `refitd_client`: their signatures and docstrings."""

import dataclasses
import inspect
import re
from collections.abc import Iterator
from enum import Enum
from typing import Any

import refitd_client
from generate.markdown import code, page, prose, table
from refitd_client.errors import Fault, RefitError, WaitTimeoutError
from refitd_client.rollout import TokenCounts, TokenSpan, spans

INTRODUCTION = """\
# Python SDK

What `refitd_client` has for trainers. Importing it imports neither torch nor any part of the
service. How to publish from one process, from all ranks and as deltas is in [publishing](../publishing.md); what a
trainer's framework needs in [trainers](../trainers.md).
"""
ERRORS = """\
Everything that refitd raises of its own is a `RefitError`, and its message says what to do. `fault` says whose it is.
After a `PublishError` nothing is visible, and the step can be published again. After a `ServiceProblemError` of
`publish` the version is published all the same, and is the error's `publication`: `wait` on that when the cause is
mended, and publish the next step (the same one again begins a new generation, by a new publisher).
"""
ANSWERS = """\
In `refitd_client.rollout`: which version generated which tokens ([rollouts](../rollouts.md)).
"""
DO = {
    Fault.TRAINER: "change what was passed, said or called; the same again fails again",
    Fault.CHECKPOINT: "publish another version: this one will not be served",
    Fault.ENGINE: "look at the engines that it names; the service goes on trying",
    Fault.SERVICE: "nothing, or start the service: what was published is found; `wait` can be called again",
    Fault.STORAGE: "make room, or mend the file system, and publish the step again",
}
_PUBLISH = (
    "WeightPublisher",
    "PublishOptions",
    "Sharded",
    "Publication",
    "Handed",
    "Served",
    "EngineOnVersion",
    "Progress",
)
_SECTIONS = re.compile(r"^(Args|Returns|Raises):$", re.MULTILINE)
_DUNDER = {"__enter__", "__exit__", "__init__"}


def sdk_page() -> str:
    """The page."""
    from refitd_client.front import VLLMWeightSyncClient
    from refitd_client.trainers.transformers import RefitCallback  # transformers, with peft, takes seconds to import
    from refitd_plan.planner import plan

    public = {name: getattr(refitd_client, name) for name in refitd_client.__all__}
    errors = [each for each in public.values() if _is_error(each)]
    others = [each for name, each in public.items() if name not in _PUBLISH and not _is_error(each)]
    return page(
        INTRODUCTION,
        "## Publishing",
        *(_entry(public[name]) for name in _PUBLISH),
        _entry(RefitCallback, module=True),
        _entry(VLLMWeightSyncClient, module=True),
        "## Answers of engines",
        ANSWERS,
        *(_entry(each) for each in (spans, TokenSpan, TokenCounts)),
        "## Asking the service, and planning",
        *(_entry(each) for each in others),
        _entry(plan, module=True),
        "## Errors",
        ERRORS,
        table(["error", "fault", "when"], (_error(each) for each in _by_family(errors))),
        table(["fault", "what to do"], ((code(fault), prose(text)) for fault, text in DO.items())),
    )


def _is_error(each: Any) -> bool:
    return inspect.isclass(each) and issubclass(each, Exception)


def _by_family(errors: list[type[RefitError]]) -> list[type[RefitError]]:
    """Each after what it is a kind of."""
    return sorted(errors, key=_line)


def _line(error: type[RefitError]) -> list[str]:
    """Its ancestors among them, and itself."""
    return [each.__name__ for each in reversed(error.__mro__) if issubclass(each, RefitError)]


def _error(error: type[RefitError]) -> tuple[str, str, str]:
    return (
        "· " * (len(_line(error)) - 1) + code(error.__name__),
        _fault(error),
        prose(error.__doc__ or ""),
    )


def _fault(error: type[RefitError]) -> str:
    if error is RefitError:
        return ""
    return "`engine` or `service`" if error is WaitTimeoutError else code(error.fault)


def _entry(each: Any, *, module: bool = False) -> str:
    name = f"{each.__module__}.{each.__name__}" if module else each.__name__
    told = _told(inspect.getdoc(each) or "")
    if not inspect.isclass(each):
        return page(f"### {each.__name__}", _signature(each.__name__, each), *told)
    if issubclass(each, Enum):
        return page(f"### {name}", *told, f"One of {', '.join(code(member.value) for member in each)}.")
    if dataclasses.is_dataclass(each):
        rows = [(code(field.name), code(_shown(field.type))) for field in dataclasses.fields(each)]
        return page(f"### {name}", *told, table(["field", "type"], rows), *_methods(each))
    made = _told(inspect.getdoc(each.__init__) or "")
    return page(f"### {name}", _signature(each.__name__, each.__init__), *told, *made, *_methods(each))


def _methods(each: type) -> Iterator[str]:
    ours = [kind for kind in reversed(each.__mro__) if kind.__module__.startswith("refitd_client")]
    for name, method in {name: member for kind in ours for name, member in vars(kind).items()}.items():
        if name.startswith("_") or name in _DUNDER:
            continue
        if isinstance(method, property):
            yield page(f"#### {each.__name__}.{name}", *_told(inspect.getdoc(method.fget) or ""))
        elif inspect.isfunction(method) and method.__doc__:
            yield page(f"#### {each.__name__}.{name}", _signature(name, method), *_told(inspect.getdoc(method) or ""))


def _signature(name: str, call: Any) -> str:
    """One parameter a line where there are many. Types of names that no trainer imports are cut to their last part."""
    signature = inspect.signature(call)
    parameters: list[str] = []
    is_keyword = False
    for each in signature.parameters.values():
        if each.name == "self":
            continue
        if each.kind is each.KEYWORD_ONLY and not is_keyword:
            is_keyword = True
            parameters.append("*")
        parameters.append(_parameter(each))
    result = signature.return_annotation
    returns = "" if result is signature.empty or name[0].isupper() else f" -> {_shown(result)}"
    line = f"{name}({', '.join(parameters)}){returns}"
    if len(line) > 100:
        line = f"{name}(\n" + "".join(f"    {each},\n" for each in parameters) + f"){returns}"
    return f"```text\n{line}\n```"


def _parameter(each: inspect.Parameter) -> str:
    stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
    typed = "" if each.annotation is each.empty else f": {_shown(each.annotation)}"
    default = "" if each.default is each.empty else f" = {_value(each.default)}"
    return f"{stars}{each.name}{typed}{default}"


def _value(default: Any) -> str:
    return "..." if "object at" in repr(default) else repr(default)


def _shown(annotation: Any) -> str:
    text = annotation.strip("\"'") if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", text)


def _told(text: str) -> Iterator[str]:
    """A docstring: paragraphs; what follows `Args:` and the like as a list."""
    head, *rest = _SECTIONS.split(text)
    for paragraph in head.strip().split("\n\n"):
        yield f"```text\n{paragraph}\n```" if paragraph.lstrip().startswith(">>>") else prose(paragraph)
    for title, body in zip(rest[::2], rest[1::2], strict=True):
        yield f"{title}:"
        items = [" ".join(body.split())] if title == "Returns" else _items(body)
        yield "\n".join(f"- {prose(item)}" for item in items)


def _items(body: str) -> Iterator[str]:
    """Items begin at the least indentation; what is indented further goes on with the one before."""
    lines = [line for line in inspect.cleandoc(f"\n{body}").splitlines() if line.strip()]
    item: list[str] = []
    for line in lines:
        if item and not line.startswith(" "):
            yield " ".join(item)
            item = []
        item.append(line.strip())
    if item:
        yield " ".join(item)
