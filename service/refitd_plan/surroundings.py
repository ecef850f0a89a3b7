"""What can be seen of the environment that a plan is made in."""

from importlib.metadata import PackageNotFoundError, distribution, entry_points

_PLUGINS = "sglang.srt.plugins"


def has_plugin() -> bool:
    """Whether SGLang and refitd's plugin are installed together here. Of another environment nothing is known."""
    try:
        distribution("sglang")
    except PackageNotFoundError:
        return False
    return any(point.module.startswith("refitd_sglang") for point in entry_points(group=_PLUGINS))
