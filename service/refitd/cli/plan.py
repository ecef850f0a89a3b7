"""`refitd plan`: how weights get from trainer to engines, and whether both fit, before anything is started."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from refitd.cli.exits import ExitCode
from refitd.cli.options import Json
from refitd.cli.output import PAGE_WIDTH, speaking
from refitd_plan.job import DEFAULTS

_MACHINE, _TRAINER, _ENGINE, _ROLLOUTS = "Machine", "Trainer", "Engine", "Rollouts"


def _number(flag: str, metavar: str, text: str, panel: str) -> Any:
    """An option, with the setting's default behind its text, which is said in `Job` alone."""
    default = DEFAULTS.get(flag.removeprefix("--").replace("-", "_"))
    told = text if default is None else f"{text} [{default}]"
    # What stands in brackets would be taken for a style of Rich's, and left out.
    return typer.Option(flag, metavar=metavar, help=escape(told), rich_help_panel=panel, show_default=False)


Allocation = Annotated[
    str | None,
    typer.Argument(metavar="[ALLOCATION]", help="An AReaL allocation, such as 'sglang:d1|fsdp:d1'", show_default=False),
]
Areal = Annotated[
    Path | None,
    typer.Option("--areal", metavar="FILE", help="An AReaL configuration (YAML) to take all from; flags win"),
]
EngineGpus = Annotated[int | None, _number("--engine-gpus", "N", "GPUs that generate", _MACHINE)]
TrainerGpus = Annotated[int | None, _number("--trainer-gpus", "N", "GPUs that train", _MACHINE)]
EngineTp = Annotated[int, _number("--engine-tp", "N", "GPUs of one engine [1]", _MACHINE)]
Shared = Annotated[bool, typer.Option("--shared", help="Both get the same GPUs", rich_help_panel=_MACHINE)]
GpusPerNode = Annotated[int | None, _number("--gpus-per-node", "N", "GPUs of a node [those of this machine]", _MACHINE)]
GpuMemory = Annotated[
    float | None, _number("--gpu-memory", "GIB", "What programs can have of one GPU [as the driver says]", _MACHINE)
]
Nodes = Annotated[int | None, _number("--nodes", "N", "Nodes of the job [1]", _MACHINE)]
HostMemory = Annotated[
    float | None, _number("--host-memory", "GIB", "The host's memory, where the root is on a tmpfs", _MACHINE)
]
SharedFiles = Annotated[
    bool,
    typer.Option("--shared-files/--no-shared-files", help="All see the same root", rich_help_panel=_MACHINE),
]
Plugin = Annotated[
    bool | None,
    typer.Option(
        "--plugin/--no-plugin",
        help=escape("refitd is installed in SGLang's environment [if both are in this one]"),
        rich_help_panel=_ENGINE,
        show_default=False,
    ),
]
Model = Annotated[
    Path | None,
    _number("--model", "DIR", "The model's folder; without it no memory is planned", _TRAINER),
]
Precision = Annotated[
    str | None, _number("--precision", "bf16|mixed|fp32", "How weights and optimizer are kept", _TRAINER)
]
Optimizer = Annotated[str | None, _number("--optimizer", "adamw|adamw8bit|sgd", "The optimizer", _TRAINER)]
Loss = Annotated[str | None, _number("--loss", "fused|eager", "Whether it copies all logits in fp32", _TRAINER)]
Checkpointing = Annotated[
    bool | None,
    typer.Option(
        "--gradient-checkpointing/--no-gradient-checkpointing",
        help="Recompute activations",
        rich_help_panel=_TRAINER,
        show_default=False,
    ),
]
MicroBatch = Annotated[int | None, _number("--micro-batch-tokens", "N", "Tokens of the largest micro-batch", _TRAINER)]
Reference = Annotated[
    bool | None,
    typer.Option(
        "--reference-model",
        help="Its ranks hold a frozen copy as well, for a KL penalty",
        rich_help_panel=_TRAINER,
        show_default=False,
    ),
]
LoraRank = Annotated[int | None, _number("--lora-rank", "N", "Train adapters of this rank alone", _TRAINER)]
Expandable = Annotated[
    bool | None,
    typer.Option(
        "--expandable-segments",
        help="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True is set",
        rich_help_panel=_TRAINER,
        show_default=False,
    ),
]
Fraction = Annotated[
    float | None, _number("--mem-fraction-static", "SHARE", "SGLang's [what it chooses by the GPU's size]", _ENGINE)
]
MaxTokens = Annotated[int | None, _number("--max-total-tokens", "N", "Most tokens of the KV cache", _ENGINE)]
Context = Annotated[int | None, _number("--context-length", "N", "SGLang's [the model's]", _ENGINE)]
Running = Annotated[int | None, _number("--running-requests", "N", "Most requests at a time of one engine", _ENGINE)]
KvCache = Annotated[str | None, _number("--kv-cache-dtype", "auto|fp8", "SGLang's [auto]", _ENGINE)]
Attention = Annotated[str | None, _number("--attention-backend", "flashinfer|fa3|triton", "SGLang's", _ENGINE)]
Graphs = Annotated[
    bool | None,
    typer.Option("--cuda-graphs/--no-cuda-graphs", help="SGLang's", rich_help_panel=_ENGINE, show_default=False),
]
Batch = Annotated[int | None, _number("--batch-size", "N", "Prompts of a step", _ROLLOUTS)]
Samples = Annotated[int | None, _number("--samples", "N", "Answers to each prompt", _ROLLOUTS)]
Prompt = Annotated[int | None, _number("--prompt-tokens", "N", "Longest prompt", _ROLLOUTS)]
Answer = Annotated[int | None, _number("--max-new-tokens", "N", "Longest answer", _ROLLOUTS)]
Concurrent = Annotated[int | None, _number("--concurrent-rollouts", "N", "Prompts in work at a time", _ROLLOUTS)]


def plan(
    allocation: Allocation = None,
    areal: Areal = None,
    engine_gpus: EngineGpus = None,
    trainer_gpus: TrainerGpus = None,
    engine_tp: EngineTp = 1,
    shared: Shared = False,
    gpus_per_node: GpusPerNode = None,
    gpu_memory: GpuMemory = None,
    nodes: Nodes = None,
    host_memory: HostMemory = None,
    shared_files: SharedFiles = True,
    plugin: Plugin = None,
    model: Model = None,
    precision: Precision = None,
    optimizer: Optimizer = None,
    loss: Loss = None,
    gradient_checkpointing: Checkpointing = None,
    micro_batch_tokens: MicroBatch = None,
    reference_model: Reference = None,
    lora_rank: LoraRank = None,
    expandable_segments: Expandable = None,
    mem_fraction_static: Fraction = None,
    max_total_tokens: MaxTokens = None,
    context_length: Context = None,
    running_requests: Running = None,
    kv_cache_dtype: KvCache = None,
    attention_backend: Attention = None,
    cuda_graphs: Graphs = None,
    batch_size: Batch = None,
    samples: Samples = None,
    prompt_tokens: Prompt = None,
    max_new_tokens: Answer = None,
    concurrent_rollouts: Concurrent = None,
    json: Json = False,
) -> None:
    """Plan before the job starts: which way the weights go and why, whether trainer and engines fit on their GPUs, and
    the smallest changes that make them fit.

    ALLOCATION is an AReaL string of 2025 (sglang.d4p1t1+d2p1t1) or of today (sglang:d4|fsdp:d4); --engine-gpus and
    --trainer-gpus say the same in numbers. GPUs are read from this machine, unless they are given. What nobody said
    is assumed, and listed. Ends with 0 where it fits, or no model was given, and with 1 where it does not.

    \b
    refitd plan sglang.d1p1t1+d1p1t1 --gpus-per-node 1 --gpu-memory 44.42 --model /models/qwen2.5-0.5b
    refitd plan --areal gsm8k_grpo.yaml --gpu-memory 44.42 --model /models/qwen2.5-0.5b
    refitd plan 'sglang:d4t2+fsdp:d8' --model /models/qwen3-8b --precision mixed --gradient-checkpointing
    refitd plan --engine-gpus 4 --trainer-gpus 4 --gpus-per-node 8 --json | jq '{transport, reason}'
    """
    given = {name: value for name, value in locals().items() if name not in {"json", "areal", "kv_cache_dtype"}}
    # Here, because only this command needs them.
    from refitd.cli.areal_config import Read, kv_cache_bytes, read_areal
    from refitd.cli.plan_shown import shown
    from refitd_client import plan as made
    from refitd_plan.outputs import with_keys

    with speaking(json=json) as out:
        said = {name: value for name, value in given.items() if value is not None}
        if kv_cache_dtype is not None:
            said["kv_cache_bytes"] = kv_cache_bytes("--kv-cache-dtype", kv_cache_dtype)
        of_file = Read() if areal is None else read_areal(areal, said)
        found = made(**{**of_file.settings, **said})
        found = replace(
            found,
            assumptions=(*found.assumptions, *of_file.assumed),
            advice=(*found.advice, *of_file.advice),
            areal=with_keys(found.areal, of_file.patch),
        )
        out.show(found, *shown(found), width=PAGE_WIDTH)
        if found.memory is not None and not found.memory.fits:
            raise typer.Exit(ExitCode.FAILED)
