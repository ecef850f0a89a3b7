"""Plans before a job starts: how weights get from the trainer to the engines, and whether both fit on their GPUs.

    allocation   who computes on how many GPUs         model       the model's shape, counted from config.json
    machine      the GPUs, and which rank is on which  job         what trainer and engines are set to
    memory       the memory of every process           transport   which way, and the host's memory
    fit          the verdict, and what would fit       plan        the plan
    planner      all of it: `plan()`

Everything but NVML in `machine`, `planner` and the reading of a `config.json` is pure. The driver's account of its GPUs
needs a binding: refitd's extra `plan`.
"""
