"""Full checkpoints that the service writes from a base and deltas, for engines that cannot take deltas."""
