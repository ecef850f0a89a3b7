"""Followers in a Ray job: on each node with engines an actor that has a `refitd serve --follow` as its process.

>>> from refitd_client.ray import start_followers
>>> engines = {node_id: ["http://127.0.0.1:30000"] for node_id in nodes_with_engines}
>>> followers = start_followers("http://10.0.0.1:8700", engines, base_model="/models/qwen3-8b")
>>> followers.urls
{'1c0f…': 'http://127.0.0.1:8700', '9be2…': 'http://127.0.0.1:8700'}

Each node needs refitd with the extra `ray` (`pip install '.[ray]'`), which brings the service.
"""

import importlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx

from refitd_client.backoff import backoff
from refitd_client.errors import FollowerStartError

_OWN_OPTIONS = frozenset({"--root", "--state", "--follow", "--engine", "--host", "--port"})
_MARGIN = 30.0  # seconds beyond the follower's own time: Ray starts a process for the actor first


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerOrder:
    """What an actor starts on its node. `command` has no address: that is the node's."""

    command: tuple[str, ...]
    root: str
    port: int
    is_reachable: bool


class FollowerActor:
    """The actor. Ray starts it again, and it the follower, when its process dies."""

    def __init__(self, order: FollowerOrder) -> None:
        # TLS and tokens aside, whoever reaches the port can change engines: without a token it is loopback's alone.
        host = _ray().util.get_node_ip_address() if order.is_reachable else "127.0.0.1"
        Path(order.root).mkdir(parents=True, exist_ok=True)
        self._process = FollowerProcess([*order.command, "--host", host], order.port)

    def ready(self, timeout: float) -> str:
        return self._process.wait_ready(timeout)

    def pid(self) -> int | None:
        """The follower's process on the node, None where it is being started again."""
        return self._process.pid

    def stop(self) -> None:
        self._process.stop()


@dataclass(frozen=True, slots=True, kw_only=True)
class RayFollower:
    """One follower: the node that it is on, the URL at which it listens, and its actor."""

    node_id: str
    url: str
    actor: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RayFollowers:
    """The followers of a job. They end with `stop`, with the job, or when nothing refers to them any more."""

    members: tuple[RayFollower, ...]

    @property
    def urls(self) -> dict[str, str]:
        """The URL of each follower by the id of its node."""
        return {member.node_id: member.url for member in self.members}

    def stop(self) -> None:
        """End all, after the updates that are under way."""
        _end([member.actor for member in self.members])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start_followers(
    follow: str | Sequence[str],
    engines: Mapping[str, Sequence[str]],
    *,
    root: str | os.PathLike[str] = "/dev/shm/refitd",  # noqa: S108 - each node's own memory
    base_model: str | os.PathLike[str] | None = None,
    port: int = 8700,
    token_file: str | os.PathLike[str] | None = None,
    follow_token_file: str | os.PathLike[str] | None = None,
    flags: Sequence[str] = (),
    num_cpus: float = 0.0,
    timeout: float = 120.0,
) -> RayFollowers:
    """Start a follower on each node with engines, and wait until all are ready.

    A follower that dies is started again on its port. It ends with its actor, also when that is killed.

    Args:
        follow: the upstream, as for `refitd serve --follow`; of several the next one when one is gone.
        engines: the URLs of the engines on each node, by the node's id: an actor gets that of its own by
            `ray.get_runtime_context().get_node_id()`.
        root: the folder on each node that versions are pulled into and engines read; `{node}` in it becomes the node's
            id. The journal is beside it, in a folder whose name ends in `.state`.
        base_model: the model that the engines were started on, on each node.
        port: each follower's port; 0 for a free one, for several nodes on one host.
        token_file: file on each node with the followers' own token. With it they listen on their node's address,
            without it on loopback alone.
        follow_token_file: file on each node with the token for the upstream.
        flags: more flags of `refitd serve`, such as `("--disk-budget", "100GB")`.
        num_cpus: CPUs that Ray counts for each follower.
        timeout: seconds until all have to be ready.

    Raises:
        FollowerStartError: Ray is not there or not initialised, a node is unknown or gone, or a follower does not
            become ready: then all are ended again. The message names the node and has what its follower printed.
        ValueError: there is no upstream or no engine, or `flags` has one that an argument stands for.
    """
    upstreams = [follow] if isinstance(follow, str) else list(follow)
    _check_arguments(upstreams, engines, flags)
    _check_nodes(engines)
    more = [*_named("--base-model", base_model), *_named("--token-file", token_file)]
    more += [*_named("--follow-token-file", follow_token_file), *flags]
    actors: dict[str, Any] = {}
    try:
        for node, urls in engines.items():
            place = os.fspath(root).replace("{node}", node)
            words = (*_each("--follow", upstreams), *_each("--engine", urls), *more)
            command = (sys.executable, "-m", "refitd", "serve", "--root", place, "--state", f"{place}.state", *words)
            order = FollowerOrder(command=command, root=place, port=port, is_reachable=token_file is not None)
            actors[node] = _actor(node, order, num_cpus)
        return RayFollowers(members=tuple(_until_ready(actors, timeout)))
    except BaseException:
        _end(actors.values())
        raise


def _actor(node: str, order: FollowerOrder, num_cpus: float) -> Any:
    strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
    options = _ray().remote(FollowerActor).options(
        num_cpus=num_cpus,
        max_restarts=-1,
        max_task_retries=-1,  # each method may be asked twice
        max_concurrency=4,  # it is asked to stop while somebody waits until it is ready
        scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(node_id=node, soft=False),
    )  # fmt: skip
    return options.remote(order)


def _until_ready(actors: Mapping[str, Any], timeout: float) -> list[RayFollower]:
    ray, asked = _ray(), {node: actor.ready.remote(timeout) for node, actor in actors.items()}
    ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout + _MARGIN)
    return [RayFollower(node_id=node, url=_url(node, answer), actor=actors[node]) for node, answer in asked.items()]


def _url(node: str, answer: Any) -> str:
    ray = _ray()
    try:
        return ray.get(answer, timeout=0)
    except FollowerStartError as error:  # which Ray's error is as well, with the whole traceback as its text
        raise FollowerStartError(f"the follower on node {node}: {getattr(error, 'cause', error)}") from None
    except ray.exceptions.GetTimeoutError:
        told = "Ray has not started its actor: is the node busy, or num_cpus more than it has?"
        raise FollowerStartError(f"the follower on node {node}: {told}") from None
    except ray.exceptions.RayError as error:
        raise FollowerStartError(f"the follower on node {node}: {error}") from error


def _end(actors: Iterable[Any]) -> None:
    """End the followers side by side; what does not answer is ended by the kernel with its actor."""
    ray = _ray()
    actors = list(actors)
    if actors:
        ray.wait([actor.stop.remote() for actor in actors], num_returns=len(actors), timeout=_MARGIN * 3)
    for actor in actors:
        ray.kill(actor)


def _check_arguments(upstreams: Sequence[str], engines: Mapping[str, Sequence[str]], flags: Sequence[str]) -> None:
    if not upstreams:
        raise ValueError("name an upstream to follow, such as http://hub:8700")
    if not engines or not all(engines.values()) or any(isinstance(urls, str) for urls in engines.values()):
        raise ValueError("name the engines of each node: {node_id: [URL, …]}")
    if taken := sorted({word.partition("=")[0] for word in flags} & _OWN_OPTIONS):
        raise ValueError(f"{', '.join(taken)} in flags: arguments of start_followers stand for it")


def _check_nodes(nodes: Iterable[str]) -> None:
    ray = _ray()
    if not ray.is_initialized():
        raise FollowerStartError("Ray is not initialised in this process: call ray.init(address='auto') first")
    alive = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    if missing := sorted(set(nodes) - alive.keys()):
        there = ", ".join(f"{node} ({address})" for node, address in sorted(alive.items()))
        raise FollowerStartError(f"no node of this Ray cluster has the id {', '.join(missing)}; there are: {there}")


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise FollowerStartError("the extra ray is not installed here: pip install '.[ray]' in its clone") from None


def _named(flag: str, value: str | os.PathLike[str] | None) -> list[str]:
    return [] if value is None else [flag, os.fspath(value)]


def _each(flag: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (flag, value)]


_READY = re.compile(r"refitd ready on (https?://\S+?:(\d+))(?=$|[\s\"'])")
_TAIL = 20  # lines of its output that an error shows
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # seconds before it is started again, twice as long each time
_STEADY = 60.0  # seconds after which a process that ends counts as the first one again
_READY_LOOK_SECONDS = 0.1  # seconds between two questions whether it is ready
_DRAIN = 60.0  # seconds for updates that are under way

# The kernel ends it with the thread that has started it (prctl(2), PR_SET_PDEATHSIG), also when this process is killed,
# which may have happened by then: the first word is its number. Asked for by the child itself, because a function
# between fork and exec is not safe in a process of several threads.
_PRELUDE = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


class FollowerProcess:
    """Keeps one process running from now on, until `stop`. What it prints goes to this process's output."""

    def __init__(self, command: Sequence[str], port: int) -> None:
        """Start it by its command line without its port. Port 0 lets it choose one, which it keeps when it is started
        again.
        """
        self._command = tuple(command)
        self._port = port
        self._url = ""
        self._changed = threading.Condition()
        self._stopping = False
        self._failed = ""  # how it ended before it was ready for the first time
        self._process: subprocess.Popen[str] | None = None
        self._tail: deque[str] = deque(maxlen=_TAIL)
        # The thread that starts it lives as long as it does: the kernel ends the process with the thread.
        self._keeper = threading.Thread(target=self._keep, name="refitd-follower", daemon=True)
        self._keeper.start()

    @property
    def pid(self) -> int | None:
        """The number of the process, None where none runs now."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def wait_ready(self, timeout: float) -> str:
        """Wait until it is ready, and return its URL. Raises FollowerStartError if it has ended, or is not ready after
        `timeout` seconds. The message has what it printed.
        """
        ends = time.monotonic() + timeout
        with self._changed:
            self._changed.wait_for(lambda: self._url or self._failed, timeout)
        while not self._failed and time.monotonic() < ends:
            if self._url and _is_ready(self._url):
                return self._url
            time.sleep(_READY_LOOK_SECONDS)
        told = self._failed or f"it is not ready after {timeout:g} s"
        raise FollowerStartError(f"refitd serve: {told}. It has printed:\n" + "\n".join(self._tail))

    def stop(self) -> None:
        """End it, and start it no more. Updates that are under way come to their end first."""
        with self._changed:
            self._stopping = True
            process = self._process
            self._changed.notify_all()
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(_DRAIN)
            except subprocess.TimeoutExpired:
                process.kill()
        self._keeper.join(_DRAIN)

    def _keep(self) -> None:
        tried = 0
        while (process := self._begun()) is not None:
            began = time.monotonic()
            self._read(process)
            status = process.wait()
            tried = 1 if time.monotonic() - began > _STEADY else tried + 1
            pause = backoff(tried, _FIRST_PAUSE, _LONGEST_PAUSE)
            with self._changed:
                if not self._stopping:
                    self._say_ended(status, pause)
                self._changed.wait_for(lambda: self._stopping, pause)

    def _begun(self) -> "subprocess.Popen[str] | None":
        with self._changed:
            if self._stopping:
                return None
            words = (sys.executable, "-c", _PRELUDE, str(os.getpid()), *self._command, "--port", str(self._port))
            self._process = subprocess.Popen(  # noqa: S603 - refitd itself, with the caller's settings
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            return self._process

    def _read(self, process: "subprocess.Popen[str]") -> None:
        """Pass on what it prints until it ends, and note where it listens."""
        with process.stdout or nullcontext(()) as lines:
            for line in lines:
                print(line, end="", flush=True)
                self._tail.append(line.rstrip())
                if (found := _READY.search(line.rstrip())) is not None:
                    with self._changed:
                        self._url, self._port = found[1], int(found[2])
                        self._changed.notify_all()

    def _say_ended(self, status: int, pause: float) -> None:
        how = f"exit status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
        if not self._url:
            self._failed = f"it has ended with {how}"
            self._changed.notify_all()
        print(f"refitd serve has ended with {how}: it is started again in {pause:g} s", flush=True)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=5, trust_env=False).is_success
    except httpx.TransportError:
        return False
