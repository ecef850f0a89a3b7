"""What is in the way of updates of an SGLang server, each with the option that ends it. Pure.

Read in SGLang 0.5.23, whose update from disk loads one folder into the model and then, since 0.5.11, into each draft
model too. A draft model with a checkpoint of its own would be given the policy's tensors: where shapes differ the
scheduler dies in the middle of the load, and where they agree the draft is wrong without an error. Draft layers that
lie in the model's own checkpoint (NEXTN, MTP) are loaded from the same folder, as at the start.
"""

from collections.abc import Iterator

from refitd.engine.port import DRAFT_LEFT, DRAFT_UPDATED, Obstacle
from refitd.engine.sglang.info import LOADS_DRAFTS, SglangServerInfo

_APART = {
    "--kt-weight-path": "its experts on the CPU (KTransformers) are always those of a folder of their own",
    "--weight-cache-mode": "its weights are those of a process that other servers use as well, and an update ends it",
    "--enable-elastic-expert-backup": "its backup of the experts keeps those of the start, and brings them back",
    "--enable-paged-experts": "experts that are on the GPU already would stay as they are, and it takes no update",
}


def draft_of(server: SglangServerInfo, startup_path: str | None) -> str | None:
    """What becomes of a server's draft model in an update; None where it has none.

    Args:
        server: how it was started.
        startup_path: the model that it was started with.
    """
    if not server.drafts:
        return None
    own = startup_path if server.model_path is None or not server.dialect.names_startup else server.model_path
    return DRAFT_UPDATED if server.draft_path in {None, "", own} else DRAFT_LEFT


def obstacles(server: SglangServerInfo, draft: str | None, *, plugged: bool, in_unit: bool) -> Iterator[Obstacle]:
    """What is in the way, the worst first.

    Args:
        server: how it was started.
        draft: what becomes of its draft model, as from `draft_of`.
        plugged: whether refitd's plugin carries out its loads.
        in_unit: whether it is loaded together with the servers that it hands prompts to, or gets them from.
    """
    if server.role is not None and not in_unit:
        other = "decode" if server.role == "prefill" else "prefill"
        text = (
            f"it is the {server.role} half of a pair (--disaggregation-mode {server.role}): updated alone, keys and "
            "values of one policy would be decoded by another"
        )
        fix = f"name it in the engines file together with its {other} servers, in one entry with 'pair'"
        yield Obstacle(text=text, fix=fix)
    if server.stages > 1:
        text = f"it has {server.stages} pipeline stages, and only the first answers for what was loaded"
        yield Obstacle(text=text, fix="start it with --tp-size in place of --pp-size")
    if server.moves_experts:
        text = (
            "it moves experts between its ranks while it serves (--enable-eplb): what a rank holds then is neither "
            "what a load wrote there nor comparable with another load"
        )
        yield Obstacle(text=text, fix="start it without --enable-eplb (--init-expert-location may stay)")
    if (option := server.keeps_weights_apart) is not None:
        yield Obstacle(text=f"{_APART[option]} ({option})", fix=f"start it without {option}")
    if draft == DRAFT_LEFT and not plugged and server.dialect.has(LOADS_DRAFTS):
        text = f"its own update would load each version into its draft model {server.draft_path} as well"
        fix = (
            "install this very refitd in the server's environment, which leaves the draft model as it was started, or "
            "start it without --speculative-draft-model-path"
        )
        yield Obstacle(text=text, fix=fix)
    elif draft == DRAFT_LEFT:
        text = f"draft: {DRAFT_LEFT}: answers stay right, and fewer of its proposals are taken as the model moves on"
        fix = "restart the server with a draft model that was trained since, or without one"
        yield Obstacle(text=text, fix=fix, blocks=False)


def adapter_obstacles(server: SglangServerInfo) -> Iterator[Obstacle]:
    """What is in the way of LoRA adapters, the worst first."""
    if server.role is not None:
        text = f"it does the {server.role} of others (--disaggregation-mode), and refitd loads adapters into one server"
        yield Obstacle(text=text, fix="start a server that prefills and decodes")
    if server.launch.dp_ranks > 1:
        text = f"it has {server.launch.dp_ranks} data-parallel ranks, and SGLang loads adapters at run time into one"
        yield Obstacle(text=text, fix="start a server for each of them, without --dp-size or --attn-dp-size")


def refusal(found: Iterator[Obstacle]) -> str | None:
    """Why a server is not updated, in a sentence; None where nothing blocks it."""
    first = next((each for each in found if each.blocks), None)
    return None if first is None else f"{first.text}: {first.fix}"
