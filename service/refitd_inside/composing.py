"""The parts of ring 1 in a service: copies of deltas, for engines without the plugin."""

from refitd.composition import Composition
from refitd_inside.materialize.disk import DiskCopies
from refitd_inside.materialize.materializer import Materializer


async def compose(core: Composition) -> None:
    copies = Materializer(core.store, core.targets, core.books, DiskCopies(core.root, core.threads))
    core.fleet.check = copies.checking(core.fleet.check)
    core.collector.sweeper.copies = copies
    core.api.copies = copies
    core.runs.append(copies.run)
