"""Plans before a job starts: how weights get from the trainer to the engines, and whether both fit on their GPUs.

    allocation, grammar   who computes on how many GPUs       model       the model's shape, counted from config.json
    machine, nvml         the GPUs                            job         what trainer and engines are set to
    placement             which rank is on which GPU          transport   the transports, and the choice of one
    memory                the memory of every process         host        the host's memory: a root on a tmpfs
    fit                   the verdict, and what would fit     plan        the plan
    planner               all of it: `plan()`

Everything but `nvml`, `planner` and the reading of a `config.json` is pure. The driver's account of its GPUs
needs a binding: refitd's extra `plan`.
"""

from refitd_plan.machine import Gpu
from refitd_plan.plan import Plan
from refitd_plan.planner import plan

__all__ = ["Gpu", "Plan", "plan"]
