"""A real SGLang with refitd's plugin, as if refitd were installed in its environment.

The plugin is found by the entry point of a distribution that lies in a folder on PYTHONPATH, together with a second one
that makes copies and loaders fail when a file says so: faults are no part of the product.
"""

import os
from pathlib import Path
from typing import Any

import httpx

from refitd.engine.sglang.info import digest_of
from refitd_client.contract.plugin import Answer, UpdateOutcome, answers_in
from support.servers import ADMIN_KEY, API_KEY, KIT, SglangServer

REPOSITORY = Path(__file__).resolve().parents[2]
GROUP = "sglang.srt.plugins"
_SECONDS = 120.0
RELEASES = os.environ.get("REFITD_SGLANG_RELEASE")  # a folder with another release of SGLang, named after it
RELEASE = Path(RELEASES).name if RELEASES else "0.5.23"
FAULTS = "support.plugin_faults:register"


def install(site: Path) -> Path:
    """Make a folder for PYTHONPATH in which SGLang finds the plugin, and the one that breaks things."""
    for name, entry in (("refitd", "refitd_sglang.plugin:register"), ("refitd-faults", FAULTS)):
        info = site / f"{name.replace('-', '_')}-0.1.0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {entry}\n")
    return site


class PluggedSglang(SglangServer):
    """SGLang on a model, with the plugin on or off."""

    name = "sglang-plugged"

    def __init__(self, folder: Path, model: Path, *flags: str, root: Path | None = None, **variables: str) -> None:
        super().__init__(folder, model, *flags)
        self.root = root
        self._fault = folder / "fault"
        self._site = install(folder / "site")
        self._variables = variables
        self.as_installed &= not self._other_modules

    @property
    def _other_modules(self) -> list[str]:
        """Folders whose modules are to be imported in place of the environment's."""
        real_triton = os.environ.get("REFITD_SGLANG_TRITON")  # tensor parallelism needs it
        found = [real_triton] if real_triton and "--tp" in self._flags else []
        return [*found, *([str(Path(RELEASES).absolute())] if RELEASES else [])]

    def environment(self) -> dict[str, str]:
        extra = self._other_modules
        extra += [str(KIT / "shims/cpu_pin_memory")] if "--enable-lora" in self._flags else []
        extra += [str(KIT / "shims/cpu_dp_attention")] if "--enable-dp-attention" in self._flags else []
        folders = [*extra, self._site, *(REPOSITORY / name for name in ("client", "service", "tests"))]
        folders += [each for each in [os.environ.get("PYTHONPATH")] if each]  # an SGLang for a GPU may lie there
        path = os.pathsep.join(str(folder) for folder in folders)
        root = {} if self.root is None else {"REFITD_SGLANG_ROOT": str(self.root)}
        mine = {"PYTHONPATH": path, "FAULT_FILE": str(self._fault)} | root | self._variables
        return super().environment() | mine

    def fail(self, *faults: str, rank: int = 0) -> None:
        """Let one rank fail: see `support.plugin_faults`."""
        self._fault.with_suffix(f".{rank}").write_text("\n".join(faults))

    @property
    def sockets(self) -> list[Path]:
        """The channels of its ranks."""
        return sorted((self.root / ".refitd" / "engines").glob("*.sock")) if self.root is not None else []

    def load(self, path: Path, label: str = "1") -> tuple[bool, str]:
        """One update: whether SGLang says that it went well, and its message."""
        order = {"model_path": str(path), "load_format": "auto", "weight_version": label, "flush_cache": True}
        reply = self._post("/update_weights_from_disk", order, ADMIN_KEY)
        return reply["success"], reply["message"]

    def update(self, path: Path, label: str = "1") -> Answer:
        """One update that the plugin carries out."""
        ok, message = self.load(path, label)
        (answer,) = answers_in(message)
        assert ok == (answer.outcome is UpdateOutcome.SERVED), message
        return answer

    def generate(self, tokens: int = 16, adapter: str | None = None) -> list[int]:
        """What it answers greedily, by one of its adapters or by the model alone."""
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        named = {} if adapter is None else {"lora_path": adapter}
        return self._post("/generate", {"input_ids": [5, 6, 7], "sampling_params": params} | named, API_KEY)[
            "output_ids"
        ]

    def load_adapter(self, name: str, path: Path) -> None:
        """Have it load a LoRA adapter."""
        reply = self._post("/load_lora_adapter", {"lora_name": name, "lora_path": str(path)}, ADMIN_KEY)
        assert reply["success"], reply

    def unload_adapter(self, name: str) -> None:
        """Have it forget one."""
        reply = self._post("/unload_lora_adapter", {"lora_name": name}, ADMIN_KEY)
        assert reply["success"], reply

    def pause(self) -> None:
        """Retract what runs."""
        self._post("/pause_generation", {"mode": "retract"}, ADMIN_KEY)

    def resume(self) -> None:
        """Go on."""
        self._post("/continue_generation", {"torch_empty_cache": False}, ADMIN_KEY)

    @property
    def checksum(self) -> str:
        """One digest of SGLang's own checksums of all its tensors, which its releases put together in several ways."""
        reply = self._post("/weights_checker", {"action": "checksum"}, ADMIN_KEY)
        assert all(rank["checksums"] for rank in reply["ranks"]), reply
        return digest_of([rank["checksums"] for rank in reply["ranks"]])

    @property
    def labels(self) -> tuple[str, str]:
        """The path and the label that it says it serves."""
        headers = {"Authorization": f"Bearer {API_KEY}"}
        info = httpx.get(f"{self.url}/model_info", headers=headers, timeout=_SECONDS, trust_env=False).json()
        return info["model_path"], info["weight_version"]

    @property
    def state(self) -> tuple[str, list[int], tuple[str, str]]:
        """All that a refused update must leave as it is."""
        return self.checksum, self.generate(), self.labels

    def _post(self, route: str, body: dict[str, Any], key: str) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.post(f"{self.url}{route}", json=body, headers=headers, timeout=_SECONDS, trust_env=False).json()
