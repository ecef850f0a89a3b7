"""A trainer's calls at the front, before a stock SGLang on the same GPU: by a folder, and by handles of memory.

    python tests/bench/gpu_front.py --models DIR --url URL --root DIR [--out FILE] [--rounds 5]

A stock SGLang was started on DIR/a (Qwen2.5-1.5B's shapes), with the root on tmpfs. This process is the trainer: it has
the weights on that GPU, and makes the calls of vLLM's weight transfer (0.32) as its classes do, `disk` and `ipc`. It
starts the service and the front, and its checkpoints lie in DIR.

    disk       the folder of a checkpoint that is there
    ipc        a handle of each tensor in the trainer's memory
    packed     handles of a buffer of 1 GiB, which is filled and sent again and again
    nan        a tensor of the trainer's has a NaN: the answer has to be an error, and the engine to answer as before

Each figure is the time from the first call of an update to the answer of its last, which says that the engine serves
the version. After each update what the engine generates is held against what it does after SGLang's own load of the
folder.
"""

import argparse
import base64
import json
import pickle
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file
from torch.multiprocessing.reductions import reduce_tensor

GPU = str(torch.cuda.get_device_properties(0).uuid)
BUFFER = 2**30
SERVICE, FRONT = "http://127.0.0.1:8790", "http://127.0.0.1:8791"


def answer(url: str) -> list[int]:
    asked = {"input_ids": [5, 6, 7, 8], "sampling_params": {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}}
    return httpx.post(f"{url}/generate", json=asked, timeout=60).raise_for_status().json()["output_ids"]


def call(path: str, body: object = None) -> str:
    reply = httpx.post(f"{FRONT}/{path}", json=body, timeout=300)
    return "" if reply.status_code == 200 else reply.text


def disk(folder: Path, _: Mapping[str, torch.Tensor]) -> str:
    return call("start_weight_update") or call("update_weights", {"update_info": {"path": str(folder)}}) or finish()


def finish() -> str:
    return call("finish_weight_update")


def _info(tensors: Mapping[str, torch.Tensor], handles: object, **more: Any) -> dict[str, Any]:
    named = {"names": list(tensors), "shapes": [list(each.shape) for each in tensors.values()]}
    dtypes = [str(each.dtype).removeprefix("torch.") for each in tensors.values()]
    pickled = base64.b64encode(pickle.dumps(handles)).decode()
    return {"update_info": {**named, "dtype_names": dtypes, "ipc_handles_pickled": pickled, **more}}


def ipc(_: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    handles = [{GPU: reduce_tensor(each)[1]} for each in tensors.values()]
    return call("start_weight_update") or call("update_weights", _info(tensors, handles)) or finish()


def packed(_: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    largest = max(each.nbytes for each in tensors.values())
    buffer = torch.empty(max(BUFFER, largest), dtype=torch.uint8, device="cuda")
    handle = {GPU: reduce_tensor(buffer)[1]}
    if said := call("start_weight_update"):
        return said
    left = list(tensors.items())
    while left:
        part: dict[str, torch.Tensor] = {}
        at = 0
        while left and at + left[0][1].nbytes <= len(buffer):
            name, tensor = left.pop(0)
            buffer[at : at + tensor.nbytes].copy_(tensor.reshape(-1).view(torch.uint8))
            part[name], at = tensor, at + tensor.nbytes
        torch.cuda.synchronize()
        sizes = [each.nbytes for each in part.values()]
        if said := call("update_weights", _info(part, handle, tensor_sizes=sizes)):
            return said
    return finish()


WAYS = {"disk": disk, "ipc": ipc, "packed": packed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("models", "root", "out"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--url")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    models = [given.models / name for name in "ab"]
    clean = []
    for model in models:
        loaded = httpx.post(f"{given.url}/update_weights_from_disk", json={"model_path": str(model)}, timeout=120)
        assert loaded.json()["success"], loaded.text
        clean.append(answer(given.url))
    assert clean[0] != clean[1]
    started = [sys.executable, "-m", "refitd"]
    state = given.root.parent / "state"
    serve = ["serve", "--root", str(given.root), "--state", str(state), "--engine", given.url, "--port", "8790"]
    front = ["front", "--root", str(given.root), "--run", "gpu/front", "--service", SERVICE, "--listen", FRONT[7:]]
    servers = [subprocess.Popen([*started, *serve, "--base-model", str(models[0])])]
    until(lambda: httpx.get(f"{SERVICE}/readyz").status_code == 200)
    servers.append(subprocess.Popen([*started, *front, "--checkpoints", str(given.models)]))
    until(lambda: call("init_weight_transfer_engine", {"init_info": {}}) == "")
    try:
        figures = measured(models, clean, given)
    finally:
        for server in servers:
            server.terminate()
    if given.out is not None:
        given.out.write_text(json.dumps(figures, indent=1) + "\n")


def until(works: Any) -> None:
    end = time.monotonic() + 60
    while True:
        try:
            if works():
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < end
        time.sleep(0.1)


def measured(models: list[Path], clean: list[list[int]], given: argparse.Namespace) -> dict[str, Any]:
    weights: list[dict[str, torch.Tensor]] = []
    for model in models:
        files = sorted(model.glob("*.safetensors"))
        weights.append({name: each.cuda() for file in files for name, each in load_file(file).items()})
    size = sum(each.nbytes for each in weights[0].values())
    figures: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "bytes": size, "command": " ".join(sys.argv)}
    print(f"{size / 1e9:.2f} GB in {len(weights[0])} tensors, {figures['gpu']}")
    for way, update in WAYS.items():
        took: list[float] = []
        for number in range(given.rounds):
            which = (number + 1) % 2
            began = time.monotonic()
            said = update(models[which], weights[which])
            took.append(round(1000 * (time.monotonic() - began), 1))
            assert said == "", said
            assert answer(given.url) == clean[which], way
        figures[way] = took
        print(f"{way:8} {statistics.median(took):8.0f} ms   {min(took):.0f} to {max(took):.0f}")
    before = answer(given.url)
    name = next(iter(weights[0]))
    weights[0][name].view(-1)[7] = float("nan")
    said = ipc(models[0], weights[0])
    assert "NaN" in said, said
    assert answer(given.url) == before
    print(f"nan      {said[:160]}")
    return figures


if __name__ == "__main__":
    main()
