"""The key that opens an engine, as it is or from a file. A file is read when the key is first needed, and again when
the engine refuses the key: that is all that an exchange of keys takes.
"""

import asyncio
from pathlib import Path


class KeyRefusedError(Exception):
    """There is no key to send. Nothing was sent. The message names the file, never what it holds."""


class Key:
    """A key, or none. `source` is the key itself or the file that holds it."""

    def __init__(self, source: str | Path | None) -> None:
        self._file = source if isinstance(source, Path) else None
        self._key = None if isinstance(source, Path) else source

    async def headers(self) -> dict[str, str]:
        """The `Authorization` header, or none.

        Raises:
            KeyRefusedError: the file cannot be read, or holds no key.
        """
        if self._file is not None and self._key is None:
            self._key = await asyncio.to_thread(_read, self._file)
        return {} if self._key is None else {"Authorization": f"Bearer {self._key}"}

    async def is_another_now(self) -> bool:
        """Read the file again; whether it holds another key than before.

        Raises:
            KeyRefusedError: as `headers`.
        """
        if self._file is None:
            return False
        before, self._key = self._key, await asyncio.to_thread(_read, self._file)
        return self._key != before


def _read(file: Path) -> str:
    try:
        key = file.read_text().strip()
    except OSError as error:
        raise KeyRefusedError(f"the key file {file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise KeyRefusedError(f"the key file {file} is no text") from None
    # An HTTP library would quote a key that is no header, and with it the key, in its error and so in every log.
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise KeyRefusedError(f"the key file {file} is empty or holds what cannot be a key: write one key, on one line")
    return key
