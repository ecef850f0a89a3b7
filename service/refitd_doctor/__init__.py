"""Diagnosis from outside a running service: `refitd doctor`, and the checks before a start.

    root        the folder: can it be written, does it give events, does its clock agree, is there room; versions' bytes
    service     the service's own settings, token and lock, and what it answers
    journal     the journal; what a restart costs while a version is in memory alone
    engines     the places that name engines; each engine's answers; whether it sees the same files
    processes   what can be seen of an engine that runs on this host
    stores      object stores, and hubs
    check       all of it
    preflight   what a start refuses

Functions that look (`look_…`, `ask_…`) return observations, and functions that judge (`judge_…`) are pure.
"""
