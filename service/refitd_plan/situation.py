"""What of a job decides which way its weights can go: the rules of `rules.py` look at this and at nothing else."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What the rules look at.

    `group` is the size of the update group; `doubled` the device that two of its ranks are on, None where none is;
    `devices` the number of devices in the job; `nodes` those that hold any of it; `whole`: the trainer has one rank,
    which holds every tensor whole; `plugin`: refitd is in SGLang's environment; `areal`: the trainer is AReaL,
    which hands refitd the folders that it has written.
    """

    group: int
    doubled: str | None
    colocated: bool
    devices: int
    nodes: int
    whole: bool
    shared_files: bool
    lora: bool
    expandable_segments: bool
    plugin: bool
    areal: bool = False
