"""`start_followers`: an actor with a follower on each node with engines."""

import importlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from refitd_client.errors import FollowerStartError
from refitd_client.ray.process import FollowerProcess

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
        """Start the follower, and do not wait for it."""
        # TLS and tokens aside, whoever reaches the port can change engines: without a token it is loopback's alone.
        host = _ray().util.get_node_ip_address() if order.is_reachable else "127.0.0.1"
        Path(order.root).mkdir(parents=True, exist_ok=True)
        self._process = FollowerProcess([*order.command, "--host", host], order.port)

    def ready(self, timeout: float) -> str:
        """Wait until the follower is ready; its URL. Raises FollowerStartError."""
        return self._process.wait_ready(timeout)

    def pid(self) -> int | None:
        """The follower's process on the node, None where it is being started again."""
        return self._process.pid

    def stop(self) -> None:
        """End the follower for good."""
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
