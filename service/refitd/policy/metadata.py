"""What a trainer says about a version beside its weights: words for people and dashboards, which are only kept.

They come with the notice or in the manifest, stay in memory and in the journal as long as their version, and so have
limits. Where both say something, the notice wins: it came later.
"""

from collections.abc import Mapping

MAX_ENTRIES = 64
MAX_CHARACTERS = 16 * 2**10
LIMITS = f"{MAX_ENTRIES} entries and {MAX_CHARACTERS} characters"


def fits(metadata: Mapping[str, str]) -> bool:
    """Whether it is little enough to be kept."""
    size = sum(len(key) + len(value) for key, value in metadata.items())
    return len(metadata) <= MAX_ENTRIES and size <= MAX_CHARACTERS


def completed(noticed: dict[str, str], published: Mapping[str, str]) -> dict[str, str] | None:
    """What the notice said and, beneath it, what the manifest says; None where that is too much to be kept."""
    both = {**published, **noticed}
    return both if fits(both) else None
