"""What engines call a version."""

from refitd.catalog.record import VersionRecord


def label_of(version: VersionRecord) -> str:
    """The weight_version that an engine gets: the step, as trainers expect it."""
    return str(version.order.step)
