"""Publishing: from a trainer's weights to a version that the service knows."""
