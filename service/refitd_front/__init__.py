"""Ring 4: servers that speak the protocols of trainers, in the engines' place."""
