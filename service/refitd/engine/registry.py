"""The kinds of engines that refitd can drive. To add one: a package beside `sglang`, and a line in `KINDS`.

The package has one `EngineKind` and the dialect of its servers. `connector` picks among the kinds, by what the operator
says of an engine, or else by what the server answers to the probe of each kind. No other module names a kind.

The engines file says which engines there are, which run each follows, how to reach it. YAML, read again when it
changes.

engines:
  - http://10.0.0.4:30000              # its URL is all that has to be said
  - url: http://10.0.0.5:30000
    id: rollout-0                      # default: host:port
    run: exp/trial                     # default: the service's --run, or the only run
    api_key_file: /run/secrets/engine  # reads; default: --engine-key-file
    admin_key_file: /run/secrets/admin # changes; default: --engine-admin-key-file
    root: /mnt/weights                 # where this engine sees the root; default: --path-map
    engine: sglang                     # what server it is; default: found out by asking it
  - url: http://10.0.0.6:30000         # servers of one policy's keys and values are one engine:
    pair: http://10.0.0.7:30000        # --disaggregation-mode prefill the one, decode the other; a list of several
"""

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError, ValidationInfo

from refitd.engine.address import check_engine_id, check_url, engine_id
from refitd.engine.kind import EngineAccess, EngineKind, EngineServer
from refitd.engine.plugin import Leads, plugins_of
from refitd.engine.port import (
    ChangeCheck,
    Coming,
    EnginePort,
    Offered,
    RankProof,
    Reached,
    Refit,
    Stage,
    Target,
    Unreached,
)
from refitd.engine.sglang import SGLANG
from refitd.engine.vllm import VLLM
from refitd.engine.wire import Guard
from refitd.text import plain_refusal
from refitd_client.contract.naming import check_run

KINDS: tuple[EngineKind, ...] = (SGLANG, VLLM)
PAUSE_MODES = ("auto", *dict.fromkeys(mode for kind in KINDS for mode in kind.pause_modes))


def check_kind(name: str) -> str:
    """Return `name` if it is that of a kind.

    Raises:
        ValueError: it is none; the message lists them.
    """
    if name not in (known := [kind.name for kind in KINDS]):
        raise ValueError(
            f"{name!r} is no kind of engine: use {', '.join(known[:-1])} or {known[-1]}, or none, and refitd finds out"
        )
    return name


def check_pause_mode(mode: str) -> str:
    """Return `mode` if an engine of some kind can pause so. Those of another kind take the best that they can.

    Raises:
        ValueError: no engine can; the message lists the modes.
    """
    if mode not in PAUSE_MODES:
        raise ValueError(f"{mode!r} is no pause mode: use {', '.join(PAUSE_MODES[:-1])} or {PAUSE_MODES[-1]}")
    return mode


_Urls = tuple[Annotated[str, AfterValidator(check_url)], ...]


def _listed_urls(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def _pairs(urls: tuple[str, ...], told: ValidationInfo) -> tuple[str, ...]:
    kinds = [kind.name for kind in KINDS if kind.pairs]
    if urls and told.data.get("engine") not in {None, *kinds}:
        raise ValueError(f"only engines of kind {' or '.join(kinds)} are updated together with others")
    return urls


class EngineSpec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    url: Annotated[str, AfterValidator(check_url)]
    id: Annotated[str, AfterValidator(check_engine_id)] | None = None
    run: Annotated[str, AfterValidator(check_run)] | None = None
    api_key_file: Path | None = None
    admin_key_file: Path | None = None
    root: str | None = None
    engine: Annotated[str, AfterValidator(check_kind)] | None = None
    pair: Annotated[_Urls, BeforeValidator(_listed_urls), AfterValidator(_pairs)] = ()

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url, *self.pair)


_KIND_AND_URL = re.compile(r"(?:([a-z][a-z0-9]*)=)?(.*)", re.DOTALL)


def check_engine(text: str) -> str:
    """Return `text` without a trailing slash, if it is `URL` or `NAME=URL`, as `--engine` takes it.

    Raises:
        ValueError: the URL cannot be used, or no kind of engine has the name.
    """
    kind, url = _KIND_AND_URL.fullmatch(text.strip()).groups()  # pyright: ignore[reportOptionalMemberAccess]
    return check_url(url) if kind is None else f"{check_kind(kind)}={check_url(url)}"


def named_engines(texts: Iterable[str]) -> dict[str, EngineSpec]:
    parts = [text.rpartition("=") for text in texts]
    return {engine_id(url): EngineSpec(url=url, engine=kind or None) for kind, _, url in parts}


def _entry(value: object) -> object:
    return {"url": value} if isinstance(value, str) else value


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    engines: list[Annotated[EngineSpec, BeforeValidator(_entry)]]


_KEYS = ", ".join(EngineSpec.model_fields)
_FORM = f"the file is a list named 'engines'; an entry is a URL, or a mapping with 'url' and any of the keys {_KEYS}"


class EnginesFileError(ValueError):
    """The engines file cannot be used; the message names the entry and the field."""


class EnginesFile:
    """The file, followed by the service. `fault` says why it cannot be used now, None while it can.

    `complain` is called once for each new fault, however often the file is read.
    """

    def __init__(self, path: Path, complain: Callable[[str], None]) -> None:
        self.path = path
        self.fault: str | None = None
        self._complain = complain
        self._text: str | None = None

    def news(self) -> list[EngineSpec] | None:
        """Return the engines, if the file has changed; None if not, or if it cannot be used. Blocks."""
        try:
            text = _text_of(self.path)
            specs = None if text == self._text else parse_engines(text, self.path)
        except EnginesFileError as error:
            self._say(str(error))
            return None
        self._text, self.fault = text, None
        return specs

    def _say(self, fault: str) -> None:
        if fault != self.fault:
            self.fault = fault
            self._complain(fault)


def read_engines(path: Path) -> list[EngineSpec]:
    """Read a file.

    Raises:
        EnginesFileError: it cannot be used; the message names it.
    """
    return parse_engines(_text_of(path), path)


def parse_engines(text: str, path: Path | None = None) -> list[EngineSpec]:
    """Read the file's text. Its path is for the message of an error.

    Raises:
        EnginesFileError: it is no YAML, a field is missing or unknown, or two entries name one engine.
    """
    prefix = "" if path is None else f"the engines file {path} cannot be used: "
    try:
        specs = _File.model_validate(_listed(yaml.safe_load(text))).engines
    except yaml.YAMLError as error:
        raise EnginesFileError(f"{prefix}it is not YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        faults = "; ".join(_sentence(fault) for fault in error.errors())
        raise EnginesFileError(f"{prefix}{faults} ({_FORM})") from error
    urls = [url for spec in specs for url in spec.urls]
    names = [*(spec.id or engine_id(spec.url) for spec in specs), *urls]
    if twice := {name for name in names if names.count(name) > 1}:
        raise EnginesFileError(f"{prefix}named twice: {', '.join(sorted(twice))}")
    return specs


def _text_of(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise EnginesFileError(f"the engines file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise EnginesFileError(f"the engines file {path} cannot be read: it is no text in UTF-8") from error


def _listed(data: Any) -> Any:
    """An empty file names no engine; a bare list is the list of engines."""
    if data is not None and not isinstance(data, list):
        return data
    return {"engines": cast("list[Any]", data or [])}


def _sentence(fault: Any) -> str:
    first, *rest = [*fault["loc"], ""]
    where = f"engine {rest[0] + 1}" if first == "engines" and isinstance(rest[0], int) else "the file"
    key = next((part for part in reversed(fault["loc"]) if isinstance(part, str)), None)
    match fault["type"]:
        case "missing":
            return f"{where} has no '{key}'"
        case "extra_forbidden":
            return f"{where} has '{key}', which is no key"
        case "model_type":
            return f"{where} is neither a URL nor a mapping" if where != "the file" else "the file is no mapping"
        case _:
            return f"{where}, {key}: {plain_refusal(fault['msg'])}"


IsNamed = Callable[[str], bool]
"""Whether the operator named the engine with this URL: only such engines are sent the service's default keys."""


def connector(
    access: EngineAccess,
    guard: Guard,
    is_named: IsNamed,
    leads: Leads | None = None,
    kinds: Sequence[EngineKind] = KINDS,
) -> Callable[[EngineSpec], EnginePort]:
    """Return a function that makes the adapter for an engine. It reads no file and calls no server yet. `is_named`:
    says which engines are sent the default keys.
    """

    plugins = plugins_of(access, leads)

    def connect(spec: EngineSpec) -> EnginePort:
        # The service's default keys go only to engines that the operator named.
        api_key, admin_key = (access.api_key, access.admin_key) if is_named(spec.url) else (None, None)
        server = EngineServer(
            url=spec.url,
            api_key=spec.api_key_file or api_key,
            admin_key=spec.admin_key_file or admin_key,
            guard=guard,
            leads=leads,
            root=spec.root or access.path_map or str(access.root),
            access=access,
            pair=spec.pair,
            plugins=plugins,
        )
        able = [kind for kind in kinds if spec.engine in {None, kind.name} and (kind.pairs or not spec.pair)]
        adapters = [kind.connect(server) for kind in able]
        return adapters[0] if len(adapters) == 1 else ProbedEngine(adapters)

    return connect


class ProbedEngine:
    """An engine of a kind that the operator does not say. The first adapter whose probe reaches it speaks to it.

    It goes on doing so, unless its probe fails and another's does not: then a server of another kind is there now.
    Where nothing listens the other adapters are not asked.
    """

    def __init__(self, adapters: Sequence[EnginePort]) -> None:
        self._adapters = adapters
        self._picked = adapters[0]
        self._was_reached = False  # the picked one: what others say of its server is of no use while it is away

    async def probe(self) -> Reached | Unreached:
        seen = await self._picked.probe()
        if isinstance(seen, Reached):
            self._was_reached = True
            return seen
        if seen.nothing_listens:
            return seen  # the others would be refused as well
        others = [adapter for adapter in self._adapters if adapter is not self._picked]
        answers = await asyncio.gather(*(adapter.probe() for adapter in others))
        for adapter, answer in zip(others, answers, strict=True):
            if isinstance(answer, Reached):
                self._picked, self._was_reached = adapter, True
                return answer
        for answer in answers:
            if isinstance(answer, Unreached) and answer.recognised:
                return answer
        if self._was_reached or seen.recognised:
            return seen
        reasons = [seen.reason, *(answer.reason for answer in answers if isinstance(answer, Unreached))]
        return Unreached(reason="; ".join(dict.fromkeys(reasons)), advice=seen.advice)

    async def _adapter(self) -> EnginePort:
        """The adapter of the server that is there, which a start after a kill in mid-load has not probed yet."""
        if not self._was_reached:
            await self.probe()
        return self._picked

    async def refit(self, target: Target, on_stage: Callable[[Stage], None]) -> Refit:
        return await (await self._adapter()).refit(target, on_stage)

    async def prefetch(self, version: Coming | Offered) -> Sequence[RankProof]:
        return await (await self._adapter()).prefetch(version)

    async def cancel_prefetch(self) -> None:
        await self._picked.cancel_prefetch()

    async def fingerprint(self, alike: str | None = None) -> str | None:
        return await (await self._adapter()).fingerprint(alike)

    async def trial(self, label: str) -> str | None:
        return await (await self._adapter()).trial(label)

    async def resume(self) -> bool:
        return await (await self._adapter()).resume()

    async def check_changes(self) -> ChangeCheck:
        return await (await self._adapter()).check_changes()

    async def aclose(self) -> None:
        await asyncio.gather(*(adapter.aclose() for adapter in self._adapters))
