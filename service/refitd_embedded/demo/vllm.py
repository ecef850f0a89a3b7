"""The demo on vLLM: one `vllm serve` in the place of the embedded engines, and how rollouts are asked of it.

vLLM is looked for in `.venv-vllm` beneath the current folder, where `make vllm` installs it for the CPU, and then on
the PATH. It takes one seed for all prompts of a request, so it gets none: another run draws other answers.
"""

import json
import shutil
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from refitd_embedded.demo.policy import ANSWER, VOCABULARY
from refitd_embedded.demo.processes import Child, ProcessError
from refitd_embedded.demo.rollouts import NotNowError, Question, Rollout, replied

INSTALLED = Path(".venv-vllm/bin/vllm")
START_SECONDS = 300.0


def program() -> str:
    """Return vLLM's command.

    Raises:
        ProcessError: there is none.
    """
    found = str(INSTALLED.absolute()) if INSTALLED.exists() else shutil.which("vllm")
    if found is None:
        raise ProcessError(f"there is no vLLM: neither {INSTALLED} ('make vllm' installs it) nor a vllm on the PATH")
    return found


def start(running: ExitStack, workdir: Path, model: Path) -> tuple[list[Child], list[str]]:
    """Start a server, and return its process and its URL, each as the only one of a list.

    Args:
        running: stops it.
        workdir: the folder for its tokenizer and its log.
        model: what it serves.

    Raises:
        ProcessError: there is no vLLM, or it does not start.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = {
        "--host": "127.0.0.1",
        "--port": port,
        "--tokenizer": write_tokenizer(workdir / "tokenizer"),
        "--dtype": "float32",
        "--max-model-len": 32,
        "--max-num-seqs": 256,
    }
    words = ["serve", str(model), *(word for name, value in flags.items() for word in (name, str(value)))]
    words += ["--enforce-eager"]  # it starts sooner, and the model is small
    child = Child(
        *("vllm", words, workdir / "logs"), program=program(), variables=environment(), start_seconds=START_SECONDS
    )
    running.enter_context(child)
    url = f"http://127.0.0.1:{port}"
    child.until(lambda: _answers(url))
    return [child], [url]


def _answers(url: str) -> bool | None:
    try:
        return httpx.get(f"{url}/health", trust_env=False, timeout=5.0).status_code == httpx.codes.OK or None
    except httpx.TransportError:
        return None


def environment() -> Mapping[str, str]:
    """Return the variables of a server. vLLM reads those with CPU in their names where it computes on the CPU alone."""
    of_cpu = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    return {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **of_cpu}


def write_tokenizer(folder: Path) -> Path:
    """Write a tokenizer with a word for each token, and return its folder: vLLM does not start without one."""
    folder.mkdir()
    model = {"type": "WordLevel", "vocab": {f"t{token}": token for token in range(VOCABULARY)}, "unk_token": "t0"}
    nothing = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    content = {"version": "1.0", **nothing, "added_tokens": [], "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


async def ask(
    http: httpx.AsyncClient, url: str, questions: Sequence[Question], deadline: float
) -> list[Rollout | None]:
    """Ask a vLLM for one batch; None for an answer that was cut short.

    Its answers name no version, so its label is asked for before and after them.

    Args:
        http: makes the calls.
        url: the server's.
        questions: the batch.
        deadline: seconds that it may take.

    Raises:
        NotNowError: it has to be asked again, also because the weights changed meanwhile.
        RolloutError: it refuses.
    """
    before = await _label(http, url, deadline)
    body = {
        "prompt": [question.problem.prompt for question in questions],
        "temperature": 1.0,
        "max_tokens": ANSWER,
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    choices = (await replied(http.post(f"{url}/v1/completions", json=body, timeout=deadline), url)).json()["choices"]
    if await _label(http, url, deadline) != before:
        raise NotNowError("the weights changed during the batch")
    return [_read(question, url, raw, before) for question, raw in zip(questions, choices, strict=True)]


async def _label(http: httpx.AsyncClient, url: str, deadline: float) -> str:
    return str((await replied(http.get(f"{url}/weight_info", timeout=deadline), url)).json()["weight_version"])


def _read(question: Question, url: str, raw: Mapping[str, Any], label: str) -> Rollout | None:
    tokens, logprobs = raw["token_ids"], raw["logprobs"]["token_logprobs"]
    if len(tokens) != ANSWER:
        return None
    return Rollout(
        problem=question.problem,
        engine=url,
        answer=tuple(tokens),
        logprobs=tuple(logprobs),
        versions=(label,) * ANSWER,
    )
