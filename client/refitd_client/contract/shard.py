"""How large the header of a shard may be. The service reads no larger one, so publishers write none."""

MAX_HEADER_BYTES = 32 * 2**20  # the format allows 100 MB; 200,000 tensors take 20 MB
