"""Ring 1: the service beside the code inside an engine: its ranks, their leases, and deltas for engines without it."""
