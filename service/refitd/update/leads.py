"""The lease that a service asks plugins for: as long as it takes to look at all of its engines some times."""

from pathlib import Path

import structlog

from refitd.engine.plugin.leading import Leads, leads_of, leads_of_group
from refitd.policy.next_action import at_rest_interval
from refitd.state.store import Store

log = structlog.get_logger(__name__)


def service_leads(
    store: Store, root: Path, state_folder: Path, probe_interval: float, group: tuple[str, int] | None
) -> Leads | None:
    """Return the service's lease; without a name of its own it leads no engine, and all else works. Blocks.

    Args:
        store: has the engines.
        root: the folder of the service.
        state_folder: its own, with its name.
        probe_interval: seconds between two looks at an engine, as the operator wants.
        group: name and epoch of the group that the service leads; None where it is no part of one.
    """
    root = root.resolve()

    def apart() -> float:
        return at_rest_interval(probe_interval, len(store.engines))

    if group is not None:
        return leads_of_group(root, *group, probe_interval, apart)
    try:
        return leads_of(root, state_folder, probe_interval, apart)
    except OSError as error:
        log.warning("engines with the plugin are not told who leads them", reason=str(error))
        return None
