"""What a publisher has for all of its versions."""

from dataclasses import dataclass, field
from typing import Literal

from refitd_client.delta.maker import DeltaMaker
from refitd_client.files.mapped import Mappings
from refitd_client.http.connection import Connection
from refitd_client.publish.run_folder import RunFolder
from refitd_client.transport.ipc.exporting import Debt
from refitd_client.transport.ipc.making import Layouts
from refitd_client.write.content import Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """`debt` and `layouts` are of hand-overs: what the last one owes, and where its tensors lie. `engines` is what each
    notice asks for where no engine follows the run.
    """

    folder: RunFolder
    reading: Reading
    deltas: DeltaMaker
    mappings: Mappings
    connection: Connection | None
    engines: Literal["mine"] | None = None
    debt: Debt = field(default_factory=Debt)
    layouts: Layouts = field(default_factory=Layouts)


def check_engines(engines: str | None, service_url: str | None) -> None:
    """What a publisher asks of the service.

    Raises:
        ValueError: it is no such thing, or there is no service to ask.
    """
    if engines not in {None, "mine"}:
        raise ValueError(f"engines is {engines!r}: it is 'mine', or None")
    if engines is not None and service_url is None:
        raise ValueError("engines='mine' needs the service_url of the service that has the engines")
