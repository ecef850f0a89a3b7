"""The API, its authentication, its event stream and metrics."""
