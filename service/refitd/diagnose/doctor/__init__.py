"""`refitd doctor`: live checks before and while a service runs, each finding with what to do about it.

    root        the folder: can it be written, does it give events, does its clock agree, is there room
    service     the service's own settings, token, journal and lock, and what it answers
    engines     the places that name engines; each engine's answers; whether it sees the same files
    processes   what can be seen of an engine that runs on this host
    versions    the bytes of good versions
    check       all of it

Functions that look (`look_…`, `ask_…`) return observations, and functions that judge (`judge_…`) are pure.
"""
