"""Publishing from a GPU, Qwen2.5-1.5B shapes, beside the pinned copy and save_file, in one run. Prints JSON."""

import json
import os
import shutil
import statistics as st
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from refitd_client import WeightPublisher
from refitd_client.contract.slot import layout_of, slot_name, slots_path
from refitd_client.header import layout


def shapes():
    h, kv, ff, v = 1536, 256, 8960, 151936
    yield "model.embed_tokens.weight", (v, h)
    for i in range(28):
        p = f"model.layers.{i}."
        yield p + "self_attn.q_proj.weight", (h, h)
        yield p + "self_attn.q_proj.bias", (h,)
        yield p + "self_attn.k_proj.weight", (kv, h)
        yield p + "self_attn.k_proj.bias", (kv,)
        yield p + "self_attn.v_proj.weight", (kv, h)
        yield p + "self_attn.v_proj.bias", (kv,)
        yield p + "self_attn.o_proj.weight", (h, h)
        yield p + "mlp.gate_proj.weight", (ff, h)
        yield p + "mlp.up_proj.weight", (ff, h)
        yield p + "mlp.down_proj.weight", (h, ff)
        yield p + "input_layernorm.weight", (h,)
        yield p + "post_attention_layernorm.weight", (h,)
    yield "model.norm.weight", (h,)


torch.manual_seed(0)
weights = {n: torch.randn(s, device="cuda", dtype=torch.bfloat16) * 0.02 for n, s in shapes()}
size = sum(t.nbytes for t in weights.values())
out = {"bytes": size, "gpu": torch.cuda.get_device_name(), "cores": os.cpu_count()}


def ms(xs):
    return {"n": len(xs), "p50": round(st.median(xs), 1), "min": round(min(xs), 1), "max": round(max(xs), 1)}


def timed(f):
    torch.cuda.synchronize()
    a = time.perf_counter()
    f()
    return (time.perf_counter() - a) * 1e3


pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)


def copy():
    o = 0
    for t in weights.values():
        n = t.nbytes
        pinned[o : o + n].view(torch.bfloat16).copy_(t.view(-1), non_blocking=True)
        o += n
    torch.cuda.synchronize()


out["pinned copy"] = ms([timed(copy) for _ in range(7)][2:])
del pinned
root = Path(tempfile.mkdtemp(dir="/dev/shm"))


def plain(i=[0]):
    i[0] += 1
    p = root / f"plain{i[0]}"
    p.mkdir()
    save_file(weights, p / "m.safetensors")
    shutil.rmtree(p)


out["save_file"] = ms([timed(plain) for _ in range(3)])


def hand_back(version, n=[0]):
    n[0] += 1
    for path in version.iterdir():
        if path.suffix != ".safetensors":
            path.unlink()
    slot = root / slots_path("run") / slot_name(layout_of(map(layout, version.iterdir())), f"{n[0]:032x}")
    slot.parent.mkdir(parents=True, exist_ok=True)
    version.rename(slot)


free0 = torch.cuda.mem_get_info()[0]
for check in (True, False):
    with WeightPublisher(root, "run", check_finite=check, fingerprints=True) as pub:
        fresh, slot, held, done_ms, parts = [], [], [], [], []
        step = 0
        for i in range(2):
            step += 1
            res = {}
            fresh.append(timed(lambda: res.update(p=pub.publish(weights, step=step))))
            last = res["p"]
            hand_back(last.path)
        for i in range(8):
            step += 1
            res = {}
            slot.append(timed(lambda: res.update(p=pub.publish(weights, step=step))))
            parts.append(res["p"].timings)
            hand_back(res["p"].path)
        for i in range(8):
            step += 1
            res = {}
            torch.cuda.synchronize()
            a = time.perf_counter()
            s = pub.publish(weights, step=step, block="staged")
            b = time.perf_counter()
            p = s.committed()
            c = time.perf_counter()
            held.append((b - a) * 1e3)
            done_ms.append((c - a) * 1e3)
            hand_back(p.path)
        key = "checked" if check else "unchecked"
        out[f"fresh, {key}"] = ms(fresh)
        out[f"slot committed, {key}"] = ms(slot[2:])
        out[f"slot staged: held, {key}"] = ms(held[1:])
        out[f"slot staged: committed, {key}"] = ms(done_ms[1:])
        out[f"parts, {key}"] = parts[-1]
    shutil.rmtree(root / "run", ignore_errors=True)
    shutil.rmtree(root / ".refitd", ignore_errors=True)
out["extra GPU bytes"] = free0 - torch.cuda.mem_get_info()[0]
shutil.rmtree(root)
print(json.dumps(out, indent=1))
