"""Reading versions ahead, in a process beside each rank: SGLang's loop never waits, and Python lets one thread run.

A thread that reads a version beside that loop waits for the interpreter at every step, some thousands of times. So a
clerk reads: it looks at the folder, checks names, shapes, dtypes and digests, lays a delta out for the model, and hands
over a letter and open files. The rank's thread maps them, which are a few steps.

    letters    what rank and clerk say to each other
    line       a socket between them that carries letters and open files
    rooms      memory that both see: a delta's indices and values
    process    the process: `python -m refitd_sglang.ahead`; it imports neither torch nor SGLang
    reading    what it does with an order
    clerk      the process as the rank sees it: begun, asked, stopped, begun again when it is lost
    findings   a letter and open files as what the rank's thread would have found by itself

The clerk ends when its rank does. Without one the thread reads, as ever.
"""
