"""What the service tells of itself beside its API: metrics, traces, and the log's context."""
