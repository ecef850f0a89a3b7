"""What each way costs, in figures of docs/benchmarks.md: a test holds every number here against that page."""

from collections.abc import Mapping

from refitd_plan.transport import Transport

COSTS: Mapping[Transport, str] = {
    Transport.DISK: "66 ms to publish and 62 ms in the engine with the plugin; 2,978 ms by save_file and a reload",
    Transport.DISK_DELTA: "38 ms to publish and 7-10 ms in the engine with the plugin, where 1 % changed",
    Transport.HANDOVER: "11 ms in the engine, while the files follow",
    Transport.NCCL: "17-22 ms over NVLink in one request, 1,136 ms with a request for each parameter",
    Transport.GLOO: "788 ms",
}
MEASURED_GB = 3.09
MEASURED = f"{MEASURED_GB:g} GB in bf16, one H200"
"""What all of them were measured on."""


def measured(version: float | None) -> str:
    """What the figures are of, and how a version of this job compares. `version` is in bytes, None where not known."""
    if version is None:
        return MEASURED
    gigabytes = version / 1e9
    return f"{MEASURED}; a version of this job has {gigabytes:.2f} GB: about {gigabytes / MEASURED_GB:.2g} times that"
