"""SGLang's own checksums of its tensors (/weights_checker), as one digest. Pure."""

import msgspec
import xxhash


def digest_of(ranks: object) -> str | None:
    """One digest over all ranks' tensors; None where the reply has no checksums. Ranks come in any order."""
    try:
        checksums = [rank.checksums for rank in msgspec.convert(ranks, list[_Rank])]
    except msgspec.ValidationError:
        return None
    if not checksums or not all(checksums):
        return None
    each = sorted(msgspec.json.encode(rank, order="sorted") for rank in checksums)
    return f"xxh3:{xxhash.xxh3_128(b''.join(each)).hexdigest()}"


class _Rank(msgspec.Struct):
    checksums: dict[str, str]
