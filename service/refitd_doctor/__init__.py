"""Diagnosis from outside a running service: `refitd doctor`, and the checks before a start.

    root        the folder: can it be written, does it give events, does its clock agree, is there room; versions' bytes
    service     the service's settings, files of secrets and journal, and what it answers
    engines     the places that name engines; each engine's answers; whether it sees the same files
    stores      object stores, and hubs
    check       all of it

Functions that look (`look_…`, `ask_…`) return observations, and functions that judge (`judge_…`) are pure.
"""
