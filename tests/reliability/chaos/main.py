"""`make chaos`: kills the real publisher, service and engines at random times, under load, and prints what came of it.

    python tests/reliability/chaos/main.py [--rounds 200] [--sglang-rounds 60] [--seed N] [--out FILE] [--folder DIR]

Exit status 1 when an answer was wrong, a version was lost or leaked, an engine was left paused or a round did not end
in sync. With REFITD_SGLANG_VENV a real SGLang is one of the engines; `--sglang-rounds` of the rounds catch it in the
middle of a load. With REFITD_VLLM_VENV a real vLLM is one of them.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # `support` lies there
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from chaos.run import main

if __name__ == "__main__":
    sys.exit(main())
