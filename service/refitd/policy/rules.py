"""How patient and how strict the catalog is."""

from dataclasses import dataclass

from refitd_client.contract.states import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogRules:
    """Times are in seconds. `kind` is what engines get, full versions or adapters; without `deltas` those are refused
    by kind.
    """

    scan_interval: float
    settle_for: float
    settle_timeout: float
    allow_dtype_cast: bool
    kind: Kind = Kind.FULL
    deltas: bool = True
