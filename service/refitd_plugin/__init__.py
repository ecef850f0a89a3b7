"""The transaction inside an engine's process: prepare, commit, restore. Nothing here knows which engine it is.

    port           what an engine's hook implements: one rank's process, and calls of its update function
    rank_plugin    one rank: its engine, or why there is none, and its answers to the service; `settings` are the
                   operator's
    channel        a socket in the root, where the service sends what comes next; how threads run beside the engine's
                   loop
    update         one update: prepared, decided by all ranks, loaded, put back
    delta          deltas, written into what is served
    memory         where a version lies, and how its bytes get into the model
    proof          fingerprints of what is in memory
    prefetch       a process beside the rank that reads versions

The package imports the client alone. torch is imported by those modules only that a rank with a model needs.
"""
