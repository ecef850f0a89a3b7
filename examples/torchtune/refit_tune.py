"""torchtune's checkpointer, which also publishes; and what the tiny recipe beside it (tiny.yaml) learns from."""

from typing import Any

from torchtune.training import FullModelHFCheckpointer

from refitd_client import WeightPublisher


class RefitCheckpointer(FullModelHFCheckpointer):
    """Publishes what the recipe saves at the end of each epoch. The version is the number of epochs that are done."""

    def __init__(self, root: str, run: str, service_url: str, wait: float = 0.0, **settings: Any) -> None:
        super().__init__(**settings)
        self._publisher = WeightPublisher(root, run, service_url)
        self._wait = wait

    def save_checkpoint(self, state_dict: dict[str, Any], epoch: int, **how: Any) -> None:
        super().save_checkpoint(state_dict, epoch, **how)
        publication = self._publisher.publish(self._output_dir / f"epoch_{epoch}", step=epoch + 1)
        if self._wait:
            publication.wait(self._wait)


class NoTokenizer:
    """The rows are tokens already."""

    pad_id = 31


def rows(tokenizer: NoTokenizer, packed: bool) -> list[dict[str, list[int]]]:
    """Numbers that count up."""
    return [{"tokens": [16, n, n + 1, n + 2], "labels": [16, n, n + 1, n + 2]} for n in range(14)]
