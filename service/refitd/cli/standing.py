"""How a run's standing looks: the one verdict that `refitd status`, `refitd top` and the dashboard give. Pure."""

from collections.abc import Iterable, Mapping

from rich.text import Text

from refitd_client.contract.states import Standing

# A shape for each, so that none is told by its colour alone; what needs somebody first.
_LOOKS: Mapping[Standing, tuple[str, str]] = {
    Standing.TROUBLED: ("▲", "bold red"),
    Standing.PAUSED: ("‖", "yellow"),
    Standing.MOVING: ("▶", "yellow"),
    Standing.ROLLED_BACK: ("◀", "cyan"),
    Standing.CURRENT: ("●", "green"),
}


def shown(standing: Standing) -> Text:
    """Shape and word."""
    shape, style = _LOOKS[standing]
    return Text(f"{shape} {standing}", style=style)


def worst(standings: Iterable[Standing]) -> Standing | None:
    """What all runs together stand at: what the one says that needs somebody most; None without runs."""
    return min(standings, key=list(_LOOKS).index, default=None)
