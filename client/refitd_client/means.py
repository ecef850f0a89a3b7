"""What a publisher has for all of its versions."""

from dataclasses import dataclass, field

from refitd_client.connection import Connection
from refitd_client.content import Reading
from refitd_client.delta.maker import DeltaMaker
from refitd_client.handover.lending import Debt
from refitd_client.handover.making import Layouts
from refitd_client.mapped import Mappings
from refitd_client.run_folder import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """`debt` and `layouts` are of hand-overs: what the last one owes, and where its tensors lie."""

    folder: RunFolder
    reading: Reading
    deltas: DeltaMaker
    mappings: Mappings
    connection: Connection | None
    debt: Debt = field(default_factory=Debt)
    layouts: Layouts = field(default_factory=Layouts)
