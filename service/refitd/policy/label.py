"""What engines call a version."""

from refitd.state.version import VersionRecord


def label_of(version: VersionRecord) -> str:
    """The weight_version that an engine gets: the step, as trainers expect it."""
    return str(version.order.step)
