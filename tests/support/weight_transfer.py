"""vLLM's weight transfer as its clients call it: `HTTPVLLMWeightSyncClient` (0.32.0), call for call."""

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from .jobs import PATIENCE


class WeightTransfer:
    """The calls of one trainer. A refusal is returned as its sentence, and success as an empty text."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def init(self, **info: Any) -> str:
        return self._post("init_weight_transfer_engine", {"init_info": info})

    def start(self) -> str:
        return self._post("start_weight_update")

    def update(self, **info: Any) -> str:
        return self._post("update_weights", {"update_info": info})

    def finish(self, label: str | None = None) -> str:
        return self._post("finish_weight_update", None if label is None else {"weight_version": label})

    def by_disk(self, folder: Path, label: str | None = None) -> str:
        """Make one whole update; the first refusal."""
        return self.start() or self.update(path=str(folder)) or self.finish(label)

    def ask(self, path: str) -> Any:
        return self._http.get(path).json()

    def _post(self, path: str, body: object = None) -> str:
        reply = self._http.post(path, json=body)
        if reply.status_code == 200:
            return ""
        assert reply.status_code == 400, reply.text
        return reply.json()["error"]["message"]
