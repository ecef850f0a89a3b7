"""Publishing from several ranks without gathering: each writes its own byte ranges of the shared shard files.

    every rank   claims      which part of which tensor it holds (metadata, sent when it has changed)
    rank 0       layout      proves that the claims are whole tensors, cuts files as a gathered save would, shares out
                             the writing: what several ranks hold is split over them
    rank 0       staging     creates the files at full size
    every rank   write       its ranges, checked for NaN, cast and synced
    every rank   digest      a share of the files, when all is written
    rank 0       commit      index, manifest, rename, notice; the outcome goes to every rank

With `delta="auto"` every rank compares its parts with a copy, and says what has changed; if it is little, rank 0 writes
and commits that, and no rank writes shards.

Rank 0 asks and the others answer (`rank_group.py`), so every wait has one rank to name. A rank that fails says so
instead of its answer; one that dies closes its connection. Either way rank 0 throws the staging folder away and tells
the rest.
"""

from refitd_client.sharded.holdings import Sharded
from refitd_client.sharded.publisher import ShardedPublisher

__all__ = ["Sharded", "ShardedPublisher"]
