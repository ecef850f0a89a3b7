"""How patient and how strict the catalog is."""

from dataclasses import dataclass

from refitd.settings import Settings
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

    @classmethod
    def of(cls, settings: Settings) -> "CatalogRules":
        """From the service's settings."""
        return cls(
            scan_interval=settings.scan_interval,
            settle_for=settings.settle,
            settle_timeout=settings.settle_timeout,
            allow_dtype_cast=settings.allow_dtype_cast,
            kind=settings.kind,
            deltas=settings.takes_deltas,
        )
