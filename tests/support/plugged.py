"""A real SGLang with refitd's plugin, as if refitd were installed in its environment.

The plugin is found by the entry point of a distribution that lies in a folder on PYTHONPATH, together with a second one
that makes copies and loaders fail when a file says so: faults are no part of the product.
"""

import json
import os
import socket
from pathlib import Path
from typing import Any

from support.servers import SglangServer

REPOSITORY = Path(__file__).resolve().parents[2]
GROUP = "sglang.srt.plugins"
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
    """SGLang on a model, with the plugin on or off. `fault` is the file that the second plugin obeys."""

    name = "sglang-plugged"

    def __init__(self, folder: Path, model: Path, *flags: str, root: Path | None = None, **variables: str) -> None:
        super().__init__(folder, model, *flags)
        self.root = root
        self.fault = folder / "fault"
        self._site = install(folder / "site")
        self._variables = variables

    def environment(self) -> dict[str, str]:
        folders = [self._site, *(REPOSITORY / name for name in ("client", "service", "tests"))]
        path = os.pathsep.join(str(folder) for folder in folders)
        root = {} if self.root is None else {"REFITD_SGLANG_ROOT": str(self.root)}
        return super().environment() | {"PYTHONPATH": path, "FAULT_FILE": str(self.fault)} | root | self._variables


def ask(socket_path: Path, /, **request: Any) -> dict[str, Any]:
    """One request and its reply over a channel."""
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(30)
        line.connect(str(socket_path))
        line.sendall(json.dumps(request).encode() + b"\n")
        with line.makefile("rb") as reply:
            return json.loads(reply.readline())
