"""A version's files: from tensors and plans to synced bytes under their final name."""
