"""torchtitan's checkpointer, which also publishes: the `checkpoint` of a configuration, with `enable=True`."""

from dataclasses import dataclass
from typing import Any

from torchtitan.components.checkpointer import MODEL, CheckpointManager

from refitd_client import WeightPublisher


class RefitCheckpoints(CheckpointManager):
    """Publishes the weights after each step, under the names of Hugging Face. Every rank publishes its parts."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        root: str
        run: str
        service_url: str
        wait: float = 0.0

    def __init__(self, config: Config, **parts: Any) -> None:
        super().__init__(config, **parts)
        self._publisher = WeightPublisher(config.root, config.run, config.service_url, ranks="all")
        self._wait = config.wait

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        weights = self.sd_adapter.to_hf(self.states[MODEL].state_dict())
        publication = self._publisher.publish(weights, step=curr_step)
        if self._wait:
            publication.wait(self._wait)
        return super()._save(curr_step, last_step)

    def _close(self) -> None:
        self._publisher.close()
        super()._close()
