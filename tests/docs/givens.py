"""What a page takes for granted: what is there before its first block, and what its placeholders stand for."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from support.planning_page import CONFIGS

# A trainer has published three steps, and engines serve the last.
SERVICE = """\
refitd serve --root /mnt/weights --engine http://127.0.0.1:30000 --base-model /models/tiny
"""
PUBLISHED = """\
python - <<'END'
from refitd_client import WeightPublisher
with WeightPublisher("/mnt/weights", run="RUN", service_url="http://127.0.0.1:8700") as publisher:
    for step in (1, 2, 3):
        publisher.publish("/models/tiny", step=step).wait(timeout=60)
END
"""
MODEL = """\
from refitd_embedded.demo import policy
model = policy.fresh(1)
def train_step(model):
    with __import__("torch").no_grad():
        for weight in model.parameters():
            weight.mul_(0.99)
"""
HANDED = """\
from refitd_client import WeightPublisher
root, run, service_url, steps = "/mnt/weights", "grpo", "http://127.0.0.1:8700", 4
"""
RUN, VERSION = "grpo-7b", "grpo-7b~v000003"


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """`before` is shell, `names` is Python before each Python block; `words` are filled in first, in their order."""

    before: str = ""
    names: str = ""
    words: Mapping[str, str] = field(default_factory=dict[str, str])


THREE_STEPS = {"range(1, 1001)": "range(1, 4)"}  # the thousand steps of a run
GPU = "--gpus-per-node 1 --gpu-memory 40"  # there may be none to ask
RUNNING = {"RUN": RUN, "ENGINE": "127.0.0.1:30000", "VERSION": VERSION, "ID": VERSION}
GIVENS: Mapping[str, Given] = {
    "README.md": Given(
        before=SERVICE,
        names=MODEL,
        words={
            **THREE_STEPS,
            "rollback RUN": "rollback RUN --yes",  # nobody is there to be asked
            "--root DIR": "--root /mnt/weights",
            "publish DIR": "publish /models/tiny",
            "--run R --step N": f"--run {RUN} --step 7",
            "ALLOCATION": f"sglang.d1p1t1+d1p1t1 {GPU}",
            **RUNNING,
        },
    ),
    "docs/quickstart.md": Given(words={"time.sleep(1)": "time.sleep(0)"}),
    "docs/single-gpu.md": Given(
        names=MODEL, words={"plan sglang.d1p1t1+d1p1t1": f"plan sglang.d1p1t1+d1p1t1 {GPU}", **THREE_STEPS}
    ),
    "docs/handover.md": Given(before=SERVICE, names=MODEL + HANDED),
    "docs/transports.md": Given(
        before=SERVICE,
        names=MODEL + HANDED,  # its engine follows this run from then on
        words={"transports /models/base": "transports /models/tiny --run grpo --yes --publications 1"},
    ),
    "docs/security.md": Given(before="mkdir -p /etc/refitd\n"),
    "docs/runbook.md": Given(
        before=SERVICE + PUBLISHED,
        words={"--root DIR": "--root /mnt/weights", "--engine URL": "--engine http://127.0.0.1:30000", **RUNNING},
    ),
    "docs/day-two.md": Given(
        before=SERVICE + PUBLISHED,
        words={
            "runs close RUN": f"runs close {RUN} --yes",
            "runs delete RUN": f"runs delete {RUN} --yes",
            "engines remove ENGINE": "engines add http://127.0.0.1:30001 && refitd engines remove 127.0.0.1:30001",
            **RUNNING,
        },
    ),
    "docs/trainers.md": Given(
        before="mkdir -p /data/run/exp/trial\ncp -rL /models/tiny /data/run/exp/trial/weight_update_v12\n"
    ),
    "docs/areal.md": Given(before="mkdir -p /data/areal\n"),
    "docs/front.md": Given(
        before="mkdir -p /data/checkpoints\n"
        "cp -rL /models/tiny /data/checkpoints/step-1\ncp -rL /models/tiny /data/checkpoints/step-2\n"
    ),
    "docs/planning.md": Given(before=SERVICE.replace("/mnt", "/shared")),
}
# Models of which a page needs a configuration alone; all others are the tiny one that the engines serve.
CONFIGURATIONS = {"qwen2.5-0.5b": CONFIGS["Qwen2.5-0.5B"]}
