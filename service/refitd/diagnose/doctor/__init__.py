"""`refitd doctor`: live checks before and while a service runs, each finding with what to do about it.

    nonce                       a text in a file of the root, for whoever sees the same files
    root_facts, root_verdicts   the folder: can it be written, does it give events, does its clock agree, is there room
    service, door               the service's own token, journal and lock; does it take the token
    told                        what a service that runs says of its engines
    places, engines             who names engines; each engine: is it there, is it SGLang, do the keys open it
    sharing                     does an engine see the same files, proved and never guessed
    processes                   what can be seen of an engine that runs on this host
    hub, gpus, nccl, libraries  its way to the hub, its GPUs, its variables and libraries for a broadcast
    check                       all of it

Modules that look (`look_…`, `ask_…`) return observations, and functions that judge (`judge_…`) are pure.
"""
