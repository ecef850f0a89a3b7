"""A callback for TRL's trainers that generate with a vLLM server: refitd updates the server, and TRL does not.

>>> from refitd_client.trainers.trl import RefitServerCallback
>>> refit = RefitServerCallback("/shared/weights", "grpo/trial", "http://127.0.0.1:8700")
>>> trainer = GRPOTrainer(args=GRPOConfig(use_vllm=True, vllm_mode="server", ...), callbacks=[refit], ...)

With `vllm_mode="server"` TRL makes a `VLLMClient`. The client generates over HTTP, and before the first rollouts of
each step it broadcasts the weights by NCCL. The callback has TRL make a client of this module in its place: it
generates in the same way, and where TRL would broadcast it publishes a version and waits until the server serves it.
The server needs no `--weight-transfer-config`, and the trainer no GPU of its own.

TRL gathers the tensors, so whatever TRL can broadcast can be published: also of FSDP1 and DeepSpeed ZeRO-3, and of a
model that peft wraps the merged weights. Names are those of the model's checkpoint.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import torch.distributed
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient

from refitd_client.errors import PublishError
from refitd_client.publisher import WeightPublisher
from refitd_client.trainers import options_of
from refitd_client.write.plan import ModuleState

if TYPE_CHECKING:
    from torch import Tensor

    Named = Iterator[tuple[str, Tensor]]


class RefitServerCallback(TrainerCallback):
    """Publishes what TRL would broadcast to its vLLM server, and has TRL wait until the server serves it."""

    def __init__(
        self, root: str | os.PathLike[str], run: str, service_url: str, *, wait: float = 300.0, **publisher: Any
    ) -> None:
        """Check the arguments. The run is taken when the trainer is made.

        Args:
            root: the folder that the service watches.
            run: the run's name, such as `experiment/trial`.
            service_url: the service that updates the server.
            wait: seconds to wait after each publication until the server serves it. On several ranks it has to be
                shorter than the process group's own time limit, because the other ranks wait for rank 0.
            publisher: fields of `PublishOptions`, such as `dtype=torch.bfloat16` where the training is in
                float32 and the server is not.

        Raises:
            ValueError: `wait` is no positive number.
            TypeError: an option is none of a publisher's.
        """
        if not wait > 0:
            raise ValueError(f"wait is {wait}: it is a positive number of seconds")
        self._place = (root, run, service_url)
        self._options = options_of(publisher, type(self))
        self._wait = wait
        self._publisher: WeightPublisher | None = None
        self._published: int | None = None
        self._model: Any = None
        self._state: TrainerState | None = None
        self._has_client = False

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Take the run, and have TRL make this module's client: it makes one after this event.

        Raises:
            ValueError: the trainer does not generate with a vLLM server.
            PublishError: this release of TRL has another client.
            RefitError: as `WeightPublisher` raises it.
        """
        if not getattr(args, "use_vllm", False) or getattr(args, "vllm_mode", None) != "server":
            raise ValueError("RefitServerCallback needs use_vllm=True and vllm_mode='server' in the trainer's settings")
        if not hasattr(VLLMClient, "update_named_params"):
            raise PublishError("RefitServerCallback needs TRL 1.13 or later: its client updates a plain 'vllm serve'")
        self._state = state
        model: Any = kwargs.get("model")
        self._model = model.get_base_model() if hasattr(model, "peft_config") else model  # TRL names them without peft
        if state.is_world_process_zero:  # TRL makes a client on this rank alone
            self._publisher = WeightPublisher(*self._place, options=self._options)
            _have_trl_make(self._client)

    def _client(self, **arguments: Any) -> "_RefitVllmClient":
        _have_trl_make(VLLMClient)
        self._has_client = True
        return _RefitVllmClient(self, **arguments)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remember the state, which a training that is resumed has loaded by now.

        Raises:
            PublishError: the trainer has made another client, which would broadcast.
        """
        self._state = state
        if state.is_world_process_zero and not self._has_client:
            raise PublishError("this trainer does not make the client that RefitServerCallback stands in for")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Release the run."""
        publisher, self._publisher, self._published = self._publisher, None, None
        if publisher is not None:
            publisher.close()

    def update(self, count: int, named: "Named") -> None:
        """Publish the weights of this step and wait until the server serves them. Done once a step.

        Args:
            count: the number of tensors.
            named: yields them by their names. A model that peft wraps stays merged until it ends.

        Raises:
            RefitError: the version was not published, or is not served. The training ends with it.
        """
        step = 0 if self._state is None else self._state.global_step
        try:
            weights = {name: _kept(tensor) for name, tensor in islice(named, count)}
            if step == self._published:
                return
            if self._publisher is None:
                self._publisher = WeightPublisher(*self._place, options=self._options)
            state = weights if self._model is None else ModuleState(self._model, weights)
            self._publisher.publish(state, step=step).wait(self._wait)
            self._published = step
        finally:
            for _ in named:  # to its end, where the adapters are taken out of the weights again
                pass


class _RefitVllmClient(VLLMClient):
    """TRL's client, but for what it does to weights."""

    def __init__(self, callback: RefitServerCallback, **arguments: Any) -> None:
        self._callback = callback
        super().__init__(**arguments)

    def init_communicator(self, device: Any = 0) -> None:
        """Join no process group: nothing is broadcast."""

    def update_named_params(self, metadata: Sequence[Any], named_params: "Named") -> None:
        """Publish what TRL would broadcast."""
        self._callback.update(len(metadata), named_params)

    def reset_prefix_cache(self) -> None:
        """Do nothing: the service empties the cache at each update, with requests running."""


def _have_trl_make(client: Callable[..., VLLMClient]) -> None:
    """Set what TRL calls for a client. TRL has no argument for it."""
    cast("Any", vllm_generation).VLLMClient = client


def _kept(tensor: "Tensor") -> "Tensor":
    """A tensor that holds its values until all are written. With several ranks TRL may gather each for a moment."""
    several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    return tensor.detach().to("cpu", copy=True) if several else tensor.detach()
