"""Ring 2: the service's side of ways without files."""
