"""LoRA adapters by name, with SGLang's routes and answers: what is loaded, from where, and who uses it.

This engine computes the model alone: it reads adapters and keeps their names, and /generate refuses `lora_path`. What
answers an adapter gives is a question for a real server.
"""

import asyncio
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from safetensors import SafetensorError, safe_open


class LoadLoraBody(BaseModel):
    """POST /load_lora_adapter."""

    lora_name: str
    lora_path: str
    pinned: bool = False


class UnloadLoraBody(BaseModel):
    """POST /unload_lora_adapter."""

    lora_name: str


class Adapters:
    """The adapters by name, with their folders. One change at a time, as in SGLang."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.folders: dict[str, str] = {}
        self._turn = asyncio.Lock()

    async def load(self, name: str, folder: str) -> str | None:
        """Take an adapter in; why not, None if it was."""
        if not self.enabled:
            return "LoRA is not enabled. Please set `--enable-lora` to enable LoRA."
        async with self._turn:
            if name in self.folders:
                return f"Failed to load LoRA adapter {name} from {folder}: it is already loaded"
            try:
                await asyncio.to_thread(_read, Path(folder))
            except (OSError, SafetensorError) as error:
                return f"Failed to load LoRA adapter {name} from {folder}: {error}"
            self.folders[name] = folder
            return None

    async def unload(self, name: str) -> str | None:
        """Let an adapter go; why not, None if it is gone."""
        if not self.enabled:
            return "LoRA is not enabled. Please set `--enable-lora` to enable LoRA."
        async with self._turn:
            if self.folders.pop(name, None) is None:
                return f"LoRA with name {name} does not exist. Loaded LoRAs: {set(self.folders)}"
            return None


def lora_routes(adapters: Adapters) -> APIRouter:
    """The routes, bound to one engine's adapters."""
    router = APIRouter()

    @router.post("/load_lora_adapter")
    async def load_lora_adapter(body: LoadLoraBody) -> Response:
        return _said(await adapters.load(body.lora_name, body.lora_path), adapters)

    @router.post("/unload_lora_adapter")
    async def unload_lora_adapter(body: UnloadLoraBody) -> Response:
        return _said(await adapters.unload(body.lora_name), adapters)

    return router


def _read(folder: Path) -> None:
    (folder / "adapter_config.json").read_bytes()
    with safe_open(folder / "adapter_model.safetensors", framework="np") as file:
        for name in file.keys():  # noqa: SIM118 - no mapping
            file.get_slice(name)[:]


def _said(fault: str | None, adapters: Adapters) -> Response:
    content: dict[str, Any] = {"success": fault is None, "error_message": fault, "loaded_adapters": adapters.folders}
    return JSONResponse(content, status_code=200 if fault is None else 400)
