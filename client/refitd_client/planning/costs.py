"""What each way costs, in figures of docs/benchmarks.md: a test holds every number here against that page."""

from collections.abc import Mapping

from refitd_client.planning.transport import Transport

COSTS: Mapping[Transport, str] = {
    Transport.DISK: "66 ms to publish and 62 ms in the engine with the plugin; 2,978 ms by save_file and a reload",
    Transport.DISK_DELTA: "38 ms to publish and 7-10 ms in the engine with the plugin, where 1 % changed",
    Transport.HANDOVER: "11 ms in the engine, while the files follow",
    Transport.NCCL: "17-22 ms over NVLink in one request, 1,136 ms with a request for each parameter",
    Transport.GLOO: "788 ms",
}
"""Of 3.09 GB in bf16, on one H200."""
