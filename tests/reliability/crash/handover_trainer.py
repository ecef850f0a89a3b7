"""A trainer in a process of its own: lends the weights of seed 5 as step 5 of a run, until it is told `back SECONDS`,
and says whether it has them then. Told `overwrite`, it does its next step without asking.
"""

import sys
from pathlib import Path

from refitd_client.transport import exporter
from refitd_client.transport.offer_file import ExportedTensors, read_secret
from support.exporting import offer_of, shared
from support.mini_sglang import tiny_weights


def main() -> None:
    root = Path(sys.argv[1])
    made = shared(tiny_weights(5), root.parent)
    exported = ExportedTensors(root / "run", offer_of("run~v000005", made.tensors), read_secret(root))
    print(f"run/{exported.path.name}", flush=True)
    while line := sys.stdin.readline():
        match line.split():
            case ["back", seconds]:
                print("mine" if exported.take_back(float(seconds)) else "read", flush=True)
            case _:
                for tensor in made.tensors.values():
                    tensor.zero_()
                print("overwritten", flush=True)
    exporter.end(root / "run")
    made.close()


if __name__ == "__main__":
    main()
