"""verl: a checkpoint engine by which the actor's ranks publish, and refitd brings the rollout servers there.

    actor_rollout_ref:
      rollout:
        free_cache_engine: false
        checkpoint_engine:
          backend: refitd
          custom_backend_module: refitd_client.trainers.verl
          engine_kwargs: {refitd: {root: /shared/weights, run: grpo/trial, service_url: "http://127.0.0.1:8700"}}

verl imports this module in the trainer and in every worker, which registers the backend. At each update verl has every
rank of the actor call `send_weights`, and every rollout worker `receive_weights`:

    actor ranks      verl gathers the tensors one by one, on every rank, as for its own backends. Each rank copies its
                     share to host memory; all of them write one version. Rank 0 then waits until
                     the rollout servers serve it.
    rollout workers  receive an empty stream. verl's server adapters then only note the step: they neither write
                     weights nor empty caches, which refitd does.

verl starts the servers on ports that it chooses. Rank 0 finds them by the names of their Ray actors and adds them to
the service, which has to allow their hosts (`refitd serve --engine-allow`).
"""

import asyncio
import importlib
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from refitd_client.contract.wire import NewEngine
from refitd_client.errors import PublishError
from refitd_client.http.connection import connect_to
from refitd_client.http.publisher_client import open_client
from refitd_client.publish.publication import Publication
from refitd_client.publisher import WeightPublisher
from refitd_client.trainers import options_of
from refitd_client.ways import Transport
from refitd_client.write.content import BaseModel, casts_for
from refitd_client.write.plan import checkpoint_names, convert

if TYPE_CHECKING:
    import torch

# verl's actors that serve HTTP: those of a replica's first node. Reward models and teachers have other names.
_SERVER = re.compile(r"(sglang|vllm)_server_\d+_0")


class RefitCheckpointEngine:
    """verl's `CheckpointEngine`, in the processes of the actor and of the rollout."""

    # What verl calls sparse updates. Of an empty stream of these its adapters for SGLang and vLLM take the step alone.
    wire_format = "delta_flush"

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        root: str | os.PathLike[str],
        run: str,
        service_url: str,
        wait: float = 300.0,
        dtype: Any = "bfloat16",
        delta: Literal["auto", "never"] = "never",
        base_model: str | os.PathLike[str] | None = None,
        token: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        **publisher: Any,
    ) -> None:
        """Check the arguments. The run is taken at the first update, in the actor's processes alone.

        Args:
            bucket_size: verl passes it to every backend; there are no buckets here.
            is_master: verl says this of the actor's rank 0.
            root: the folder that the service watches, as the actor's ranks see it.
            run: the run's name.
            service_url: the service that updates the rollout servers.
            wait: seconds to wait in each update until the servers serve the version.
            dtype: the dtype of the servers, as for a `WeightPublisher`: verl trains in float32.
            delta: with `auto` only what changed is written: each rank compares its share with another copy of it.
            base_model: as for a `WeightPublisher`; every rank reads it. verl passes no module on: with it the names are
                those of this model's checkpoint also where transformers has others in memory.
            token, token_file: as for a `WeightPublisher`.
            publisher: further fields of `PublishOptions`.

        Raises:
            ValueError: `wait` is no positive number, or `delta`, the URL, the token or a dtype cannot be one.
            PublishError: `base_model` is no model's folder.
            TypeError: an option in `engine_kwargs.refitd` is none that the publisher has.
        """
        if not wait > 0:
            raise ValueError(f"wait is {wait}: it is a positive number of seconds")
        if delta not in {"auto", "never"}:
            raise ValueError(f"delta is {delta!r}: it is 'auto' or 'never'")
        given = {"token": token, "token_file": token_file, "base_model": base_model, **publisher}
        self._options = options_of(given, type(self))
        self.is_master = is_master
        self._place = (root, run, service_url)
        self._connection = connect_to(service_url, token=token, token_file=token_file)
        self._wait = wait
        self._base = None if base_model is None else BaseModel(Path(base_model))
        self._model: Any = None  # the base model without its tensors
        self._names: dict[str, str] | None = {}  # its checkpoint's by its own; None if tensors have to be converted
        self._casts = casts_for(dtype, self._base)
        self._transport: Transport | None = "delta" if delta == "auto" else None
        self._publisher: WeightPublisher | None = None
        self._publication: Publication | None = None
        self._share: dict[str, torch.Tensor] = {}
        self._servers: dict[str, str] = {}

    def prepare(self) -> dict[str, Any]:
        """On rank 0, have the service know the rollout servers that there are now, and no earlier ones of this run.

        Raises:
            PublishError: verl is set to take memory from the servers during an update.
            ServiceError: the service does not answer, or refuses a server.
        """
        if self.is_master and (servers := rollout_servers()) != self._servers:
            self._update_fleet(servers)
            self._servers = servers
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """No process group between actor and rollout."""
        return {}, {}

    def init_process_group(self, **_: Any) -> None:
        """Join nothing."""

    def finalize(self) -> None:
        """Keep the run: the next update goes on in it."""

    async def send_weights(
        self, weights: Iterable[tuple[str, "torch.Tensor"]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Publish this rank's share of a version. On rank 0, wait until the rollout servers serve it.

        A step that verl sends again, as after a validation, is not published again.

        Args:
            weights: yields each whole tensor with its name, on every rank in the same order.
            global_steps: the trainer's step.

        Returns:
            On rank 0 what the update took, for verl's metrics; else nothing.

        Raises:
            RefitError: the version was not published, or is not served. verl ends the training with it.
        """
        if global_steps is None:
            raise PublishError("verl sends weights without global_steps, which is the step that a version has")
        begin = time.monotonic()
        if self._base is not None and self._model is None:
            self._model = _empty_model(self._base)
            self._names = checkpoint_names(self._model, self._model.state_dict(), self._base.inventory)
        share = self._copied(weights)  # in this thread, whose GPU verl gathers the tensors on
        gathered = time.monotonic()
        if self._publication is None or self._publication.step != global_steps:
            await self._publish(share, global_steps)
        if not self.is_master or self._publication is None:
            return {}
        published = time.monotonic()
        await self._publication.wait_async(self._wait)
        return {
            "refitd/gather_s": gathered - begin,
            "refitd/publish_s": published - gathered,
            "refitd/serve_s": time.monotonic() - published,
            "refitd/bytes": float(self._publication.bytes),
        }

    def receive_weights(self, global_steps: int | None = None) -> Iterator[tuple[list[Any], bool]]:
        """Yield nothing: refitd writes into the server. verl's update lasts until rank 0 of the actor has waited."""
        yield from ()

    def close(self) -> None:
        """Release the run."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()

    def _ranks(self) -> tuple[int, int]:
        """This process's rank among those that publish, and how many these are."""
        distributed: Any = sys.modules["torch"].distributed
        return (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)

    def _copied(self, weights: Iterable[tuple[str, "torch.Tensor"]]) -> dict[str, "torch.Tensor"]:
        """Copy this rank's share into host memory, which is used again at the next step.

        Each tensor goes to the rank with the fewest bytes so far: all ranks see the same tensors and decide alike.
        """
        rank, size = self._ranks()
        held, self._share = self._share, {}
        taken = [0] * size
        for own, tensor in weights:  # to its end on every rank: verl gathers each tensor by a collective
            holder = taken.index(min(taken))
            taken[holder] += tensor.nbytes
            if holder == rank:
                name = (self._names or {}).get(own, own)
                self._share[name] = self._host_copy(held.get(name), name, tensor)
        return self._share

    def _host_copy(self, held: "torch.Tensor | None", name: str, tensor: "torch.Tensor") -> "torch.Tensor":
        torch: Any = sys.modules["torch"]
        dtype = getattr(torch, self._casts.target(name, str(tensor.dtype).removeprefix("torch.")))
        if held is None or held.shape != tensor.shape or held.dtype != dtype:
            held = torch.empty(tensor.shape, dtype=dtype)
        return held.copy_(tensor.detach())  # pyright: ignore[reportOptionalMemberAccess]

    async def _publish(self, share: Mapping[str, "torch.Tensor"], step: int) -> None:
        if self._publisher is None:
            ranks = "all" if self._ranks()[1] > 1 else None
            self._publisher = WeightPublisher(*self._place, ranks=ranks, options=self._options)
        share = convert(self._model, share) if self._names is None else share  # each tensor is whole, on one rank
        self._publication = await asyncio.to_thread(
            self._publisher.publish, share, step=step, transport=self._transport
        )

    def _update_fleet(self, servers: Mapping[str, str]) -> None:
        run = self._place[1]
        prefix = run.replace("/", ".") + ".verl."
        wanted = {prefix + name: url for name, url in servers.items()}
        with open_client(self._connection, try_for=self._wait) as client:
            known = {engine.id: engine.url for engine in client.engines().items}
            gone = [name for name, url in known.items() if name.startswith(prefix) and wanted.get(name) != url]
            for name in gone:
                client.remove_engine(name)
            there = {url for name, url in known.items() if name not in gone}
            for name, url in wanted.items():
                if url not in there:
                    client.add_engine(NewEngine(url=url, id=name, run=run))


def _empty_model(base: BaseModel) -> Any:
    """The model of a folder, on the device `meta`.

    Raises:
        PublishError: transformers does not make one.
    """
    torch, transformers = sys.modules["torch"], importlib.import_module("transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(base.folder)
        with torch.device("meta"):
            return getattr(transformers, config.architectures[0])(config)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"[:100]
        raise PublishError(f"transformers makes no model of base_model ({why}): leave base_model out") from error


def rollout_servers() -> dict[str, str]:
    """The URLs of the servers that verl has started for rollouts on GPUs of their own, by the names of their actors.

    Raises:
        PublishError: verl is set to take memory from the servers during an update.
    """
    import ray  # pyright: ignore[reportMissingImports]

    def settings_of(server: Any) -> tuple[str, bool, bool]:  # nested: Ray sends its code, not its name
        return server.rollout_mode.value, server.config.free_cache_engine, server.config.enable_sleep_mode

    ray_module: Any = ray
    if not ray_module.is_initialized():
        return {}
    found: dict[str, str] = {}
    for name in ray_module.util.list_named_actors():
        if (server := _SERVER.fullmatch(name)) is None:
            continue
        actor = ray_module.get_actor(name)
        mode, frees, sleeps = ray_module.get(actor.__ray_call__.remote(settings_of))
        if mode != "standalone":
            continue  # it shares the trainer's GPUs, and verl itself writes into it
        _check_memory(name, frees=frees, sleeps=sleeps and server[1] == "vllm")
        host, port = ray_module.get(actor.get_server_address.remote())
        found[name] = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    return found


def _check_memory(name: str, *, frees: bool, sleeps: bool) -> None:
    """Refuse what would run a server without its cache, or load into one whose weights verl has thrown away."""
    settings = {"free_cache_engine": frees, "enable_sleep_mode": sleeps}
    wanted = " ".join(f"++actor_rollout_ref.rollout.{setting}=False" for setting, is_set in settings.items() if is_set)
    if wanted:
        raise PublishError(
            f"verl takes memory from {name} during an update, and refitd updates a server that is whole: set {wanted}"
        )


def _register() -> None:
    """Register the backend `refitd`.

    Raises:
        PublishError: this release of verl has another interface.
    """
    base: Any = importlib.import_module("verl.checkpoint_engine.base")
    if not hasattr(base.CheckpointEngine, "wire_format"):
        raise PublishError("the backend refitd needs verl 0.9 or later: earlier releases write whatever is received")
    base.CheckpointEngineRegistry.register("refitd")(RefitCheckpointEngine)


_register()
