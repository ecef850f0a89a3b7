"""A callback for `transformers.Trainer` and the trainers built on it (TRL's): engines follow the training.

>>> from refitd_client.trainers.transformers import RefitCallback
>>> trainer.add_callback(RefitCallback("/shared/weights", "sft/trial", "http://127.0.0.1:8700"))

It publishes after every `every`-th step and whenever the trainer saves. Where the weights are DTensors (FSDP2, tensor
parallel) all ranks publish their parts; otherwise rank 0 publishes, whose weights are whole. A training that goes on
from a checkpoint before the last step that was published begins a new generation of the run by itself. Of a model that
peft wraps the adapter is published, for a service that was started with `--lora NAME`.
"""

import logging
import os
from contextlib import ExitStack
from tempfile import TemporaryDirectory, gettempdir
from typing import TYPE_CHECKING, Any, Literal, cast

from safetensors import SafetensorError
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from refitd_client.errors import InvalidWeightsError, RefitError, StorageError
from refitd_client.publish.publication import Publication
from refitd_client.publisher import WeightPublisher
from refitd_client.trainers import options_of
from refitd_client.write.content import require_as_it_is

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("refitd_client")


class RefitCallback(TrainerCallback):
    """Publishes the model that is being trained.

    `last_error` is the error of the newest publication, None if it succeeded.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        run: str,
        service_url: str | None = None,
        *,
        every: int | None = 1,
        wait: float = 0.0,
        errors: Literal["log", "raise"] = "log",
        **publisher: Any,
    ) -> None:
        """Check the arguments. The run is taken when the training begins.

        Args:
            root: the folder that the service watches.
            run: the run's name, such as `experiment/trial`.
            service_url: the service to send notices to; without it the service finds versions by watching the root.
            every: steps from one publication to the next; None publishes only when the trainer saves.
            wait: seconds to wait after each publication until engines serve it (0: do not wait), for training that
                generates with the weights that it has just made. Needs `service_url`.
            errors: `log` goes on training when a publication or the wait for it fails: the error is logged and is
                `last_error`, and the next publication is tried. `raise` ends the training with the error.
            publisher: fields of `PublishOptions`: `dtype=torch.bfloat16` where the training is in float32 and the
                engines are not, `base_model`, `token`.

        Raises:
            ValueError: `every`, `wait` or `errors` is out of range, or `wait` is given without `service_url`.
            TypeError: an option is none of a publisher's.
        """
        if every is not None and every < 1:
            raise ValueError(f"every is {every}: it is a positive number of steps, or None")
        if errors not in {"log", "raise"}:
            raise ValueError(f"errors is {errors!r}: it is 'log' or 'raise'")
        if wait < 0 or (wait > 0 and service_url is None):
            raise ValueError(f"wait is {wait}: it is seconds, and needs the service_url of the service to ask")
        self.last_error: RefitError | None = None
        self._place = (root, run, service_url)
        self._options = options_of(publisher, type(self))
        self._every = every
        self._wait = wait
        self._raises = errors == "raise"
        self._publisher: WeightPublisher | None = None
        self._published: int | None = None
        self._version_id: str | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take the run. Its errors are raised here, whatever `errors` says, before anything is trained.

        Raises:
            RefitError: as `WeightPublisher` does, or the weights cannot be published as they are held.
        """
        model = kwargs["model"]
        _check_whole(model)
        if hasattr(model, "peft_config"):
            require_as_it_is("the adapter", self._options.given(), is_adapter=True)
        self._close()
        self._published, self._version_id, self.last_error = None, None, None
        if _is_sharded(model):
            self._publisher = WeightPublisher(*self._place, ranks="all", options=self._options)
        elif state.is_world_process_zero:
            self._publisher = WeightPublisher(*self._place, options=self._options)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Publish, if it is this step's turn."""
        if self._every is not None and state.global_step % self._every == 0:
            self._publish(kwargs["model"], state)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Publish what was saved, if it was not published at the end of its step."""
        self._publish(kwargs["model"], state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Release the run."""
        self._close()

    def _publish(self, model: "torch.nn.Module", state: TrainerState) -> None:
        publisher, step = self._publisher, state.global_step
        if publisher is None or step == self._published:
            return
        try:
            self._published = step
            publication = _published(publisher, model, step)
            self._version_id = publication.version_id
            if self._wait and state.is_world_process_zero:  # every rank of a sharded publication has it; one asks
                publication.wait(self._wait)
            self.last_error = None
        except RefitError as error:
            self.last_error = error
            if self._raises:
                raise
            _log.error("step %d did not reach the engines, and the training goes on: %s", step, error)

    def _close(self) -> None:
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()


def _published(publisher: WeightPublisher, model: "torch.nn.Module", step: int) -> Publication:
    """Publish the model. Of one that peft wraps, publish the adapter, as a version of that kind."""
    if not hasattr(model, "peft_config"):
        return publisher.publish(model, step=step)
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(TemporaryDirectory(ignore_cleanup_errors=True))
            # Without embeddings: to find out whether they were resized, peft would ask the hub for the base model.
            cast("Any", model).save_pretrained(folder, save_embedding_layers=False)
        except (OSError, SafetensorError) as error:
            raise StorageError(f"the adapter cannot be saved in {gettempdir()} (TMPDIR): {error}") from error
        return publisher.publish(folder, step=step)


def _check_whole(model: "torch.nn.Module") -> None:
    """Refuse weights whose parameters are not what their names say.

    Raises:
        InvalidWeightsError: they are parts of a DeepSpeed ZeRO-3 or FSDP1 model, or of an adapter that is sharded.
    """
    if hasattr(model, "peft_config") and _is_sharded(model):
        raise InvalidWeightsError("an adapter of peft's that is sharded over ranks is not published: train it with DDP")
    for name, parameter in model.named_parameters():
        kind = type(parameter).__name__
        if kind == "FlatParameter" or hasattr(parameter, "ds_status"):
            raise InvalidWeightsError(
                f"parameter {name} is a flattened part of others, as FSDP1 and DeepSpeed ZeRO-3 keep them: train with "
                "FSDP2 (fsdp_version 2) or ZeRO-2, or publish the folders that the trainer saves: refitd publish DIR",
                tensor=name,
            )


def _is_sharded(model: "torch.nn.Module") -> bool:
    """Whether every rank has its own part."""
    return any(type(parameter).__name__ == "DTensor" for parameter in model.parameters())
