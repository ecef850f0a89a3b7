"""The part of refitd that runs inside SGLang, as a plugin: an update of the weights becomes a transaction.

    plugin       SGLang's entry point: one function is wrapped, or nothing at all
    versions     what each release of SGLang looks like, as far as the plugin touches it
    desk         what the channel answers
    engine       one rank's part of an update: prepare, decide with the others; `commit` writes, and takes back
    looking      how versions are looked at: `ahead`, by a process beside the rank, or in this thread
    way          how a version gets into the model: `whole` a full one, `sparse` a delta that is `fitted`
    standing     what is served, and what it is put back from
    loading      one load, by the model's loader or by the plan; `call` is one of SGLang's function
    transaction  what the ranks decide together, and what came of it: pure
    ranks        how they hear of each other
    source       a version on disk: looked at, checked, mapped; `startup` the model that the server began with
    changes      a delta on disk: looked at, checked, read; `kept` is its file
    recorder     watches one load and its `copies`; `plan` replays them as plain copies ever after
    derived      what follows from a plan, for all versions alike
    road         how those copies reach a GPU: `registered` files, `moves` of memory, the CUDA `driver`
    routes       the plan for single elements; a delta is `laid` out along them
    patch        changes elements in host memory; `device_patch` on a GPU with `patch_kernel`
    feeding      gives SGLang's own update function tensors in place of files
    overlap      fingerprints beside the copies
    contents     fingerprints of what is in memory; `memory` whether it is there at all
    turns        how a thread gets on beside SGLang's loop
    lease        which service leads the engine
    channel      a socket in the root, where the service says what comes next
    answer       what the reply to the service says, for people and for programs

Nothing of SGLang or torch is imported before SGLang has loaded it.
"""

PROTOCOL = 1
"""The version of what is said over the channel and in answers. It changes when a reader would have to."""
