"""What a stock SGLang does when a client drops its stream right before an update, and nobody pauses it first.

The rounds that drop a stream show that refitd is not caught by this. That shows something only where there is something
to be caught by, so a run tries it without refitd first.
"""

import threading
import time
from pathlib import Path
from typing import Any

import httpx

from chaos.midload import MidLoad
from chaos.models import NAMES
from chaos.reference import PROMPTS, question, stream
from support.servers import ADMIN_KEY, API_KEY, SglangServer

TRIES = 5
THAW_AFTER = 0.4  # seconds, in which the update arrives


def stale_updates(sglang: SglangServer, models: Path) -> int:
    """In how many of `TRIES` the new weights came with the old cache and the old label."""
    mid_load = MidLoad(sglang)
    return sum(_is_stale(sglang.url, models / NAMES[number + 1], mid_load) for number in range(TRIES))


def _is_stale(url: str, model: Path, mid_load: MidLoad) -> bool:
    with stream(url) as drop:
        mid_load.freeze()
        drop.close()
    thaw = threading.Timer(THAW_AFTER, mid_load.thaw)
    thaw.start()
    order = {"model_path": str(model), "load_format": "auto", "weight_version": f"{model.name} {time.monotonic()}"}
    updated = _post(f"{url}/update_weights_from_disk", ADMIN_KEY, order)
    thaw.join()
    says = httpx.get(f"{url}/model_info", headers=_bearer(API_KEY), trust_env=False).json()
    cached = _post(f"{url}/generate", API_KEY, question(PROMPTS[-1])).json()["meta_info"]["cached_tokens"]
    return updated.status_code == 400 and says["weight_version"] != order["weight_version"] and cached > 0


def _post(url: str, key: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(url, json=body, headers=_bearer(key), timeout=60.0, trust_env=False)


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}
