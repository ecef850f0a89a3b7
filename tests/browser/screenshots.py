"""`make screenshots`: pictures of the dashboard for the README, of a stack that really runs.

    screenshots.py FOLDER

A trainer's publisher, six engines over HTTP and the service, all real processes. One engine is stopped, one version is
bad, so that there is something to see.
"""

import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from playwright.async_api import Browser, async_playwright
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from conftest import QUIET, chromium
from refitd_client import PublishOptions, RefitClient, WeightPublisher
from refitd_embedded.demo.processes import Child

RUN = "grpo-7b"
STEPS = range(4173, 4201)
DELAYS = (0.1, 0.12, 0.14, 0.16, 0.18, 0.2)  # seconds that each engine's load takes longer
AWAY = 4  # the engine that is stopped before the last steps
TRAINING = 1.0  # seconds of a step
WHOLE = 9  # after so many steps one changes everything
DESK = {"width": 1280, "height": 1330}
PHONE = {"width": 390, "height": 1350}


def main(out: Path) -> None:
    """Take them all."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="refitd-pictures-") as name, _stack(Path(name)) as url:
        asyncio.run(_take(url, out))


@contextmanager
def _stack(folder: Path) -> Generator[str]:
    base, root = _model(folder / "base"), folder / "root"
    root.mkdir()
    with ExitStack() as running:
        engines: list[str] = []
        away = ExitStack()
        for number, delay in enumerate(DELAYS):
            words = ["refitd_embedded", "--model-path", str(base), "--port", "0", "--load-delay", str(delay)]
            keep = away if number == AWAY else running
            child = keep.enter_context(Child(f"gpu-{number}", words, folder))
            engines.append(f"  - {{id: gpu-{number}, url: '{child.url()}', run: {RUN}}}")
        (folder / "engines.yaml").write_text("engines:\n" + "\n".join(engines) + "\n")
        flags = {"--root": root, "--state": folder / "state", "--base-model": base, "--port": 0}
        flags |= {"--engines-file": folder / "engines.yaml", "--keep-last": 8, "--keep-every": 10}
        words = ["refitd", "serve", *(str(word) for flag in flags.items() for word in flag)]
        url = running.enter_context(Child("refitd", words, folder)).url()
        running.push(away)
        _history(root, base, url, away)
        yield url


def _model(folder: Path) -> Path:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def _history(root: Path, base: Path, url: str, away: ExitStack) -> None:
    """A while of training: an engine is stopped towards its end, and a step is bad."""
    weights = load_file(base / "model.safetensors")
    with (
        WeightPublisher(root, RUN, url, options=PublishOptions(base_model=base)) as publisher,
        RefitClient(url) as client,
    ):
        for step in STEPS:
            for tensor in weights.values():
                changed = tensor if step % WHOLE == 0 else tensor.flatten()[:: 60 + step % 7 * 20]
                changed.add_(0.01)
            if step == STEPS[-4]:
                away.close()
            time.sleep(TRAINING)
            publisher.publish(weights, step=step, transport="delta").wait(timeout=120)
        client.pin(f"{RUN}~v{STEPS[-5]:06d}")
        _bad(root, base, STEPS[-1] + 1)
        rejected = client.wait(f"{RUN}~v{STEPS[-1] + 1:06d}", timeout=60)
        if rejected.outcome != "failed":
            raise RuntimeError(f"the torn step is {rejected.outcome}")


def _bad(root: Path, base: Path, step: int) -> None:
    """A checkpoint with a NaN, as a trainer without the SDK writes it."""
    weights = load_file(base / "model.safetensors")
    weights["model.layers.3.mlp.up_proj.weight"][7, 11] = float("nan")
    folder = root / RUN / f"v{step:06d}"
    folder.mkdir()
    shutil.copy(base / "config.json", folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


async def _take(url: str, out: Path) -> None:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium(), args=QUIET)
        await _picture(browser, url, out / "dashboard-light.png", viewport=DESK)
        await _picture(browser, url, out / "dashboard-dark.png", viewport=DESK, color_scheme="dark")
        await _picture(browser, url, out / "dashboard-phone.png", viewport=PHONE)
        await browser.close()


async def _picture(browser: Browser, url: str, file: Path, **look: Any) -> None:
    page = await (await browser.new_context(**look)).new_page()
    await page.goto(url)
    await page.locator("table.log tbody tr").first.wait_for()
    await page.locator(".reasons li").first.wait_for()
    await page.locator(".lanes svg[role=img]").nth(3).wait_for()
    await page.screenshot(path=file)
    await page.context.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
