"""The model that training started from: what it lends to versions, and the names that its checkpoint has."""

from functools import cached_property
from pathlib import Path

from refitd_client.errors import InvalidWeightsError, PublishError
from refitd_client.write.source_folder import companions_of, open_checkpoint


class BaseModel:
    """A folder with a model, such as a snapshot in Hugging Face's cache."""

    def __init__(self, folder: Path) -> None:
        """See that it is one.

        Raises:
            PublishError: there is no such folder, or no `config.json` in it.
        """
        if not (folder / "config.json").is_file():
            raise PublishError(
                f"base_model {folder} has no config.json: give a model's folder "
                "(huggingface_hub.snapshot_download returns one), not its name on a hub"
            )
        self.folder = folder

    @property
    def companions(self) -> list[Path]:
        """Its configuration and tokenizer files."""
        return companions_of(self.folder)

    @cached_property
    def _names(self) -> frozenset[str] | None:
        try:
            shards = open_checkpoint(self.folder).shards
        except InvalidWeightsError:  # a folder with a tokenizer and a configuration alone is a good base, too
            return None
        return frozenset(entry.name for entries in shards.values() for entry in entries)

    def inventory(self) -> frozenset[str] | None:
        """The names in its checkpoint, None where it has none that can be read. Read once."""
        return self._names
