"""Plans before a job starts: how weights get from the trainer to the engines, and whether both fit on their GPUs.

    grammar, allocation   who computes on how many GPUs       config, model     the model's shape, counted
    nvml, machine         the GPUs                            words, job, given what trainer and engines are set to
    placement             which rank is on which GPU          situation         what decides about the way
    transport, rules      the ways, and which is gone         surroundings      is the plugin here
    costs, variables      what a way costs, and needs         host              the host's memory: a root on a tmpfs
    trainer, engine       memory of one rank, by formulas     memory, fit       of all ranks, and the verdict
    changes               what would make it fit              planner           all of it: `plan()`

Everything but `nvml`, `surroundings` and the reading of a `config.json` is pure. Allocation strings need a parser
library, the driver's account of its GPUs a binding: refitd's extra `plan`.
"""

from refitd_plan.machine import Gpu
from refitd_plan.plan import Plan
from refitd_plan.planner import plan

__all__ = ["Gpu", "Plan", "plan"]
