"""What the pause of a vLLM consists of, call by call: updates of a real `vllm serve` on a CPU, with refitd inside.

    PYTHONPATH=client:service:tests REFITD_VLLM_VENV=.venv-vllm python tests/bench/vllm_pause.py --models DIR
        [--rounds 20] [--beside CHECKOUT] [--out FILE]

DIR holds `model_a` and `model_b` (`tests/sglang/make-models DIR 128`). The models are tiny, so that what is left of a
pause is calls. Each adapter runs in a process of its own and loads both in turns. `--beside` names another checkout,
whose adapter takes turns with this one's in the same run, against the same server; the extension in the server is this
checkout's. Each figure is a median, with the least and the most.

    paused     from the call that pauses until the answer to the one that resumes, in milliseconds
    calls      each call to the server: how long it took, and when it was sent, from the call that pauses
    plugin     of the load, what refitd's plugin took in the server
"""

import argparse
import asyncio
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from figures import report

REPOSITORY = Path(__file__).resolve().parents[2]
WARM = 4  # updates of each adapter that do not count: the first load is learned, and the second one is proved


class Timed:
    """The calls of an adapter, with the time."""

    def __init__(self) -> None:
        from refitd.engine.vllm.dialect import WatchedTransport

        self.calls: list[dict[str, Any]] = []
        call = WatchedTransport._call

        async def timed(transport: Any, method: str, path: str, body: Any, *rest: Any) -> Any:
            began = time.perf_counter()
            reply = await call(transport, method, path, body, *rest)
            name = (body or {}).get("method") or path.partition("?")[0]
            self.calls.append({"name": name, "began": began, "ms": (time.perf_counter() - began) * 1000, "is": reply})
            return reply

        WatchedTransport._call = timed  # type: ignore[method-assign]


async def adapter(url: str, key: str, root: Path) -> None:
    """Carry out the updates that are asked for by lines of input; say what each took."""
    from refitd.engine.port import Target
    from refitd_client.contract.plugin import answers_in
    from support.engines import vllm_engine
    from support.forged import files_of

    timed, engine = Timed(), vllm_engine(url, api_key=key, root=root)
    for line in sys.stdin:
        path, label = line.split()
        await engine.probe()
        timed.calls.clear()
        target = Target(path=path, label=label, files=files_of(root, Path(path)))
        done = await engine.refit(target, lambda _: None)
        assert done.outcome.name == "ACK", done
        (load,) = [call["is"] for call in timed.calls if call["name"] == "refitd_update"]
        plugin = [each.ms for result in load.data["results"] for each in answers_in(result["message"])]
        began = next(call["began"] for call in timed.calls if call["name"] in {"/pause", "/sleep"})
        calls = [(call["name"], (call["began"] - began) * 1000, call["ms"]) for call in timed.calls]
        _, resumes, took = calls[-1]
        print(json.dumps({"paused": resumes + took, "calls": calls, "plugin": plugin[0]}), flush=True)


class Side:
    """The adapter of one checkout, in a process of its own."""

    def __init__(self, checkout: Path, *arguments: str) -> None:
        folders = [checkout / "client", checkout / "service", REPOSITORY / "tests", REPOSITORY / "tests/bench"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
        command = [sys.executable, "-P", __file__, "--adapter", *arguments]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(command, env=environment, **pipes)
        self.found: list[dict[str, Any]] = []

    def update(self, path: Path, label: int) -> None:
        """One update; remember what it took."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(path, label, file=self._process.stdin, flush=True)
        self.found.append(json.loads(self._process.stdout.readline()))

    def told(self) -> dict[str, Any]:
        """All that counts."""
        counted = self.found[WARM:]
        calls = [
            {"call": name, "began": spread([each["calls"][at][1] for each in counted])[0]}
            | {"ms": spread([each["calls"][at][2] for each in counted])}
            for at, (name, *_) in enumerate(counted[0]["calls"])
        ]
        plugin = {name: spread([each["plugin"][name] for each in counted]) for name in counted[0]["plugin"]}
        return {"paused": spread([each["paused"] for each in counted]), "calls": calls, "plugin": plugin}

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


def spread(times: list[float]) -> tuple[float, float, float]:
    """The median, the least and the most."""
    return round(statistics.median(times), 2), round(min(times), 2), round(max(times), 2)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Start a server, and update it in turns."""
    from support.forged import forge
    from support.servers import API_KEY
    from support.vllm import STARTED, PluggedVllm

    flags, variables = STARTED["vllm-plugged-in-place"]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="refitd-pause-")))
        root = folder / "root"
        (root / ".refitd").mkdir(parents=True)
        versions = [forge(root, name, 1, options.models / name) for name in ("model_a", "model_b")]
        model = options.models / "model_a"
        server = stack.enter_context(PluggedVllm(folder, model, *flags, root=root, **variables))
        checkouts = {"now": REPOSITORY} | ({} if options.beside is None else {"before": options.beside})
        sides = {name: Side(checkout, server.url, API_KEY, str(root)) for name, checkout in checkouts.items()}
        for side in sides.values():
            stack.callback(side.close)
        for number in range(WARM + options.rounds):
            for turn, side in enumerate(sides.values()):
                label = number * len(sides) + turn
                side.update(versions[label % 2], label)
        return {"rounds": options.rounds} | {name: side.told() for name, side in sides.items()}


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--beside", type=Path, help="another checkout")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--adapter", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.adapter is not None:
        url, key, root = options.adapter
        asyncio.run(adapter(url, key, Path(root)))
        return
    found = json.dumps(report([], shlex.join(sys.argv)) | run(options), indent=1)
    print(found)
    if options.out is not None:
        options.out.write_text(found + "\n")


if __name__ == "__main__":
    main()
