"""A trainer's updates of its engines, step by step as AReaL's FSDP engine does them, with the released AReaL's parts.

    AREAL_LLM_SERVER_ADDRS=ADDRESS python train.py HOW RECORD_ROOT FILEROOT MODEL…     prints one JSON document

HOW is `sglang` or `vllm`, the kind of AReaL's engine client, or `record` for a trainer whose own update of engines is
switched off: it saves, adds the key, and leaves the rest to whoever watches the record.

Each MODEL stands for what a training step made. For each of them: pause, start the update (which waits for the key in
the name-resolve record), save, add the key, wait for the engines, go on; then generate, as a rollout does.
"""

import asyncio
import json
import shutil
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from areal.api.cli_args import GenerationHyperparameters, InferenceEngineConfig, NameResolveConfig
from areal.api.io_struct import ModelRequest, WeightUpdateMeta
from areal.engine.sglang_remote import RemoteSGLangEngine
from areal.engine.vllm_remote import RemotevLLMEngine
from areal.utils import name_resolve, names

PROMPT = [5, 6, 7]
Client = RemoteSGLangEngine | RemotevLLMEngine


def main(how: str, record: str, fileroot: str, *models: str) -> None:
    name_resolve.reconfigure(NameResolveConfig(type="nfs", nfs_record_root=record))
    kind = "vllm" if how == "vllm" else "sglang"
    config = InferenceEngineConfig(
        backend=f"{kind}:d1", experiment_name="exp", trial_name="trial", fileroot=fileroot, request_retries=1
    )
    engine = RemotevLLMEngine(config) if kind == "vllm" else RemoteSGLangEngine(config)
    engine.initialize()  # addresses come from AREAL_LLM_SERVER_ADDRS, as no server has registered
    base = WeightUpdateMeta.from_disk("exp", "trial", fileroot)
    report: list[dict[str, Any]] = [generate(engine)]
    for model in models:
        meta = base.with_version(engine.get_version() + 1)
        if how == "record":
            announce(engine, meta, Path(model))
        else:
            update(engine, meta, Path(model))
        engine.set_version(engine.get_version() + 1)
        report.append({"version": meta.version, "deleted": not Path(str(meta.path)).exists(), **generate(engine)})
    print("REPORT " + json.dumps(report), flush=True)
    engine.destroy()


def announce(engine: Client, meta: WeightUpdateMeta, model: Path) -> None:
    """The rest of it without the engines: save, and add the key."""
    shutil.copytree(model, str(meta.path))
    key = names.update_weights_from_disk("exp", "trial", engine.get_version())
    name_resolve.add(key, str(datetime.now().timestamp()))  # noqa: DTZ005 - as AReaL writes it


def update(engine: Client, meta: WeightUpdateMeta, model: Path) -> None:
    """As `FSDPEngine._update_weights_from_disk`, with a copy in the place of a save."""
    engine.pause_generation()
    done = engine.update_weights_from_disk(meta)
    announce(engine, meta, model)
    done.result()
    engine.continue_generation()


def generate(engine: Client) -> dict[str, Any]:
    """A greedy answer through AReaL's own client."""
    params = GenerationHyperparameters(max_new_tokens=8, greedy=True, ignore_eos=True)
    request = ModelRequest(input_ids=list(PROMPT), gconfig=params)
    answer = asyncio.run(engine.agenerate(request))
    return {"tokens": answer.output_tokens, "versions": answer.output_versions}


if __name__ == "__main__":
    main(*sys.argv[1:])
