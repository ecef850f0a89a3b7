"""Reading versions ahead, in a process beside each rank: the engine's loop never waits, and Python lets one thread run.

A thread that reads a version beside that loop waits for the interpreter at every step, some thousands of times. So the
prefetch worker reads: it looks at the folder, checks names, shapes, dtypes and digests, lays a delta out for the model,
and sends a message and open files. The rank's thread maps them, which are a few steps.

    process     the process, and what it does with an order; it imports neither torch nor an engine. What rank and
                process say to each other, and how it travels with open files
    worker      the process as the rank sees it, and its replies as what the rank's thread would have found by itself

The worker ends when its rank does. Without one the thread reads.
"""
