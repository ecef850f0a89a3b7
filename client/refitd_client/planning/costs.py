"""What each way costs, in figures of docs/benchmarks.md: a test holds every number here against that page."""

from collections.abc import Mapping

from refitd_client.planning.transport import Transport

UNMEASURED = "not measured"
COSTS: Mapping[Transport, str] = {
    Transport.DISK: "75-90 ms to publish and 63 ms in the engine with the plugin; 2.0-3.0 s by save_file and a reload",
    Transport.DISK_DELTA: "49 ms to publish and 7-10 ms in the engine with the plugin, where 1 % changed",
    Transport.HANDOVER: "11 ms in the engine, while the files follow",
    Transport.NCCL: UNMEASURED,
    Transport.GLOO: "788 ms",
}
"""Of 3.09 GB in bf16, on one H200."""
