"""The transaction inside an engine's process: prepare, commit, restore. Nothing here knows which engine it is.

    port           what an engine's hook implements: one rank's process, and calls of its update function
    rank_plugin    one rank: its engine, or why there is none, and its channel
    channel        a socket in the root, where the service says what comes next; `requests` answers
    settings       what the operator sets; `lease` which service leads the engine
    engine         one rank's part of an update: prepare, decide with the others; `commit` writes, and takes back
    transaction    what the ranks decide together, pure; `ranks` how they hear of each other
    preparing      versions made ready; `looking` at them: `prefetch`, in a process beside the rank, or in this thread
    update_source  how a version gets into the model: `whole` a full one, `sparse` a delta that is `fitted`, `offered`
                   one in a trainer's memory (`imports`, `imported`), `again` what is served already
    restore_point  what is `served`, and what it is put back from; `following` files of what came from memory
    loading        one load, by the model's loader or by the plan; `tensor_feed` is what it is given
    source         a version on disk: looked at, checked, mapped; `startup` the model that the server began with
    changes        a delta on disk: looked at, checked, read; `kept` is its file
    recorder       watches one load and its `copies`; `plan` replays them as plain copies ever after
    derived        what follows from a plan, for all versions alike
    copy_schedule  how those copies reach a GPU: `registered` files, `moves` of memory, the CUDA `driver`
    routes         the plan for single elements; a delta is laid out along them in `layout`
    patch          changes elements in host memory; `device_patch` on a GPU with `patch_kernel`
    overlap        fingerprints beside the copies; `contents` fingerprints of what is in memory
    devices        where a model lies, and whether its memory is there
    turns          how a thread gets on beside the engine's loop

The package imports the client alone. torch is imported by those modules only that a rank with a model needs.
"""
