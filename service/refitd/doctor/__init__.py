"""`refitd doctor`: live checks before and while a service runs, each finding with what to do about it.

    root       the folder: can it be written, does it give events, does its clock agree, is there room
    service    the service's own token, journal and lock
    engines    each engine: is it there, is it SGLang, do the keys open it, does its clock agree
    sharing    does an engine see the same files, proved and never guessed
    processes  what can be seen of an engine that runs on this host
    surroundings, libraries   its environment, its GPUs, its NCCL
    check      all of it

Modules that look (`look_…`, `ask_…`) return observations, and functions that judge (`judge_…`) are pure.
"""
