"""The transaction inside an engine's process: prepare, commit, restore. Nothing here knows which engine it is.

    port           what an engine's hook implements: one rank's process, and calls of its update function
    rank_plugin    one rank: its engine, or why there is none, and its channel; `settings` are the operator's
    channel        a socket in the root, where the service sends what comes next; `requests` answers
    engine         one rank's part of an update: prepare, decide with the others, write, take back; `lease` is which
                   service leads the engine
    transaction    what the ranks decide together, pure; `ranks` how they report to each other
    preparing      versions made ready: looked at by `prefetch`, in a process beside the rank, or in this thread
    update_source  how a version gets into the model: a full one, or one that is served already; `sparse` a delta,
                   `offered` one in a trainer's memory, which is `imported`
    restore_point  what is `served`, and what it is put back from
    loading        one load, by the model's loader or by the plan; `tensor_feed` is what it is given
    source         a version on disk: looked at, checked, mapped; and the model that the server began with
    changes        a delta on disk: looked at, checked, read
    recorder       watches one load and its `copies`; `plan` replays them as plain copies ever after
    copy_schedule  how those copies reach a GPU: `registered` files, `moves` of memory, the CUDA `driver`, and
                   `device_copies` within one GPU
    layout         the plan for single elements: a delta is laid out along its routes
    patch          changes elements in host memory; `device_patch` on a GPU with `patch_kernel`
    contents       fingerprints of what is in memory, and where it lies; `overlap` takes them beside the copies
    spans          stretches of memory
    turns          how the plugin's threads run beside the engine's loop

The package imports the client alone. torch is imported by those modules only that a rank with a model needs.
"""
