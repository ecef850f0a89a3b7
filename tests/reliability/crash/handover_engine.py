"""One rank of an engine in a process of its own, which does what it is told on its standard input, a line each time:

    prepare PATH OFFER    look at an offer
    update PATH           load it; answers the outcome, and whether the model holds the weights of seed 0 or 5
    slow                  the next load stops in the middle, says `copying`, and goes on with a line

No SGLang: SGLang's own flow in a few lines (`support.mini_sglang`). Tensors are in shared memory.
"""

import sys
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from refitd_plugin.memory.source import SourceRefusedError
from support.mini_sglang import tiny_weights
from support.tiny_rank import Rank


def slow(rank: Rank) -> None:
    load, stops = type(rank.model).load_weights, [3]

    def load_weights(model: Any, weights: Any) -> None:
        for number, item in enumerate(weights):
            if number in stops:
                stops.clear()
                say("copying")
                sys.stdin.readline()
            load(model, [item])

    rank.model.__class__ = type("Slow", (type(rank.model),), {"load_weights": load_weights})


def say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    startup = Path(sys.argv[1])
    save_file(tiny_weights(0), startup / "model.safetensors")
    rank = Rank(startup)
    say("ready")
    while line := sys.stdin.readline():
        match line.split():
            case ["prepare", path, offer]:
                try:
                    say(f"prepared {rank.engine.prepare(path, offer=offer).label}")
                except (SourceRefusedError, OSError) as error:
                    say(f"refused {error}")
            case ["update", path]:
                outcome = rank.answer(Path(path)).outcome
                say(f"{outcome} {[seed for seed in (0, 5) if rank.holds(seed)]}")
            case _:
                slow(rank)
                say("slow")


if __name__ == "__main__":
    main()
