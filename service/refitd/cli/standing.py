"""How a run's standing looks: the one verdict that `refitd status`, `refitd top` and the dashboard give. Pure."""

from collections.abc import Iterable, Mapping, Sequence

from rich.text import Text

from refitd_client.contract.states import Standing

_NAMED = 3  # runs that a line names; the others it counts

# A shape for each, so that none is told by its colour alone; what needs somebody first.
_LOOKS: Mapping[Standing, tuple[str, str]] = {
    Standing.TROUBLED: ("▲", "bold red"),
    Standing.UNFOLLOWED: ("○", "bold red"),
    Standing.PAUSED: ("‖", "yellow"),
    Standing.MOVING: ("▶", "yellow"),
    Standing.ROLLED_BACK: ("◀", "cyan"),
    Standing.CURRENT: ("●", "green"),
    Standing.CLOSED: ("□", "dim"),
}


def shown(standing: Standing) -> Text:
    """Shape and word."""
    shape, style = _LOOKS[standing]
    return Text(f"{shape} {standing}", style=style)


def worst(standings: Iterable[Standing]) -> Standing | None:
    """What all runs together stand at: what the one says that needs somebody most; None without runs."""
    return min(standings, key=list(_LOOKS).index, default=None)


def folded(closed: Sequence[str]) -> list[str]:
    """The runs that are closed, in one line; none where there is none."""
    if not closed:
        return []
    more = f" and {len(closed) - _NAMED} more" if len(closed) > _NAMED else ""
    count = "1 run is" if len(closed) == 1 else f"{len(closed)} runs are"
    return [f"{count} closed: {', '.join(closed[:_NAMED])}{more} ('refitd runs')"]
