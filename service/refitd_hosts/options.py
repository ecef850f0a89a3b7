"""The settings of `refitd serve` for a group of services, for places where engines are found, and for pushing."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from refitd.text import advertised_url
from refitd_client.bucket.objects import Bucket
from refitd_client.contract.stores import is_bucket_url
from refitd_client.errors import BucketError
from refitd_hosts.discovery import check_places
from refitd_hosts.group.address import PostgresAddress, is_postgres


def _split(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _state(value: object) -> object:
    return PostgresAddress(value) if isinstance(value, str) and is_postgres(value) else value


class GroupSettings(BaseSettings):
    """The database that a group shares, and how its services are reached."""

    model_config = SettingsConfigDict(
        env_prefix="REFITD_", env_ignore_empty=True, frozen=True, extra="forbid", hide_input_in_errors=True
    )
    panels: ClassVar[Mapping[str, tuple[str, ...]]] = {"Engines": ("discover",), "Journal": ("advertise", "lease")}
    values: ClassVar[Mapping[str, str]] = {"state": "PATH|URL", "advertise": "URL", "discover": "PLACE"}

    state: Annotated[Path | PostgresAddress | None, BeforeValidator(_state)] = Field(
        default=None,
        description="Folder of the journal (default: under the XDG state directory), or the postgresql:// URL of the "
        "database that a group of services shares (needs refitd[postgres])",
    )
    lease: float = Field(
        default=3.0,
        ge=1.0,
        le=60.0,
        description="Time without an answer of the database after which another service of the group takes over",
    )
    advertise: Annotated[str, AfterValidator(advertised_url)] | None = Field(
        default=None,
        description="URL by which others reach this service as one of a group (default: its --host, or this machine's "
        "name)",
    )
    discover: Annotated[list[str], NoDecode, BeforeValidator(_split), AfterValidator(check_places)] = Field(
        default=[],
        description="Places that name engines: dns:NAME?port=N, dns:NAME?type=SRV, sglang-router+http://HOST:PORT; "
        "hosts beyond loopback need --engine-allow",
    )

    @property
    def database(self) -> PostgresAddress | None:
        """The database of the group that this service belongs to; None for a service alone."""
        return self.state if isinstance(self.state, PostgresAddress) else None


def _bucket(url: str) -> str:
    if not is_bucket_url(url):
        raise ValueError(
            "--push names an object store: s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"
        )
    try:
        return Bucket.at(url).name
    except BucketError as error:
        raise ValueError(str(error)) from None


class PushSettings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="REFITD_", env_ignore_empty=True, frozen=True, extra="forbid", hide_input_in_errors=True
    )

    panels: ClassVar[Mapping[str, tuple[str, ...]]] = {"Following": ("push",)}
    values: ClassVar[Mapping[str, str]] = {"push": "URL"}

    push: Annotated[str, AfterValidator(_bucket)] | None = Field(
        default=None,
        description="URL of an object store that good versions are pushed to, without credentials: the environment or "
        "the host's identity has them. Of each run one version more than --keep-last stays there, besides bases",
    )
