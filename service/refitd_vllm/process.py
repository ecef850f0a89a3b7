"""One rank of vLLM as the plugin sees it: its worker, its model, and how its loads are given tensors."""

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from refitd_plugin.tensor_feed import TensorFeed
from refitd_vllm.reloading import UnknownReleaseError, layerwise, packed_at_start, processed, through_layers


class VllmProcess:
    """`EngineProcess` of one worker."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        # The number by which the server names itself. This is right at the load of the model: an engine core that holds
        # the worker itself draws another afterwards. A plugin that is made later is told it.
        self.instance = str(worker.vllm_config.instance_id)
        self._feed: TensorFeed | None = None

    @property
    def name(self) -> str:
        return "vllm"

    @property
    def release(self) -> str:
        try:
            return importlib.metadata.version("vllm")
        except importlib.metadata.PackageNotFoundError:
            return "unknown"

    @property
    def port(self) -> int | None:
        """See `EngineProcess`. No worker knows it: 0."""
        return 0

    @property
    def seed(self) -> int | None:
        """See `EngineProcess`. vLLM's seed is 0 where none is given; its `instance_id` is another at each start."""
        return int(self.instance) if self.instance.isdecimal() else None

    @property
    def rank(self) -> int:
        return int(self._worker.rank)

    @property
    def size(self) -> int:
        return int(self._config.parallel_config.world_size)

    @property
    def dp_rank(self) -> int | None:
        parallel = self._config.parallel_config
        return int(parallel.data_parallel_index) if parallel.data_parallel_size > 1 else None

    @property
    def model(self) -> Any:
        return self._worker.model_runner.get_model()

    @property
    def model_path(self) -> str:
        return str(self._config.model_config.model)

    @property
    def revision(self) -> str | None:
        return self._config.model_config.revision

    @property
    def may_release(self) -> bool:
        """See `EngineProcess`: with `--enable-sleep-mode`."""
        return bool(self._config.model_config.enable_sleep_mode)

    def set_model_path(self, path: str) -> None:
        self._config.model_config.model = path

    def aside(self) -> str | None:
        config = self._config
        if config.parallel_config.pipeline_parallel_size > 1:
            return "pipeline parallelism: no stage holds the whole model, and what they hold together is not compared"
        if config.speculative_config is not None:
            return "speculative decoding: vLLM's reload leaves the draft model as it is"
        if config.parallel_config.enable_eplb:
            return "--enable-eplb: experts that have moved are not where a load writes them"
        if config.lora_config is not None:
            return "--enable-lora: the layers beneath adapters have other names than the checkpoint's"
        try:
            layerwise()
        except UnknownReleaseError as error:
            return f"vLLM {self.release} is not one that it knows: {error}"
        return packed_at_start(self.model)

    def loaded_once(self) -> str | None:
        """See `EngineProcess`. vLLM restores the form that a layer was loaded in."""
        return None

    @contextmanager
    def feeding(self, feed: TensorFeed) -> Iterator[None]:
        dtype = torch.get_default_dtype()
        self._feed = feed
        try:
            yield
        finally:
            self._feed = None
            torch.set_default_dtype(dtype)

    @property
    def writes_in_place(self) -> bool:
        """Whether a load writes into the live parameters, so that what it does can be learned."""
        return processed(self.model) is None

    def load(self, path: str, _: str, *, in_place: bool) -> tuple[bool, str]:
        """Load what is fed, under the name of a path. Raises what a loader raises. `in_place`: `writes_in_place`."""
        feed, runner, model = self._feed, self._worker.model_runner, self.model
        if feed is None:
            raise RuntimeError("nothing is fed to the load")
        with import_module("vllm.config").set_current_vllm_config(self._config):
            if in_place:
                model.load_weights(feed.tensors())
            elif feed.how == "load":
                through_layers(model, lambda: runner.reload_weights(weights_iterator=feed.tensors()))
            else:
                return False, f"it cannot be written into the live parameters: {processed(model)}"
        self.set_model_path(path)
        return True, ""

    @property
    def _config(self) -> Any:
        return self._worker.vllm_config
