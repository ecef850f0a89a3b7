"""The settings of `refitd serve` that are about following an upstream."""

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar
from uuid import uuid4

from pydantic import BeforeValidator, Field, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from refitd.text import is_web_address
from refitd_client.bucket.objects import Bucket
from refitd_client.contract.stores import is_bucket_url
from refitd_client.errors import BucketError
from refitd_hosts.follow.upstream import FollowerIdentity


def check_upstream(url: str) -> None:
    """Refuse what names no upstream, by a ValueError with a sentence."""
    if is_bucket_url(url):
        try:
            Bucket.at(url)
        except BucketError as error:
            raise ValueError(str(error)) from None
    elif not is_web_address(url) or "@" in url:
        shown = "" if "@" in url else f" {url!r}"
        raise ValueError(
            f"--follow{shown} names no upstream: write the URL of a refitd, such as http://hub:8700, or of an object "
            "store, such as s3://bucket/prefix, without credentials"
        )


def _split(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


class FollowSettings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="REFITD_", env_ignore_empty=True, frozen=True, extra="forbid", hide_input_in_errors=True
    )

    panels: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "Begin with these": ("follow",),
        "Following": ("follow_token_file", "follower", "follow_freely"),
    }
    values: ClassVar[Mapping[str, str]] = {"follow": "URL", "follower": "NAME"}

    follow: Annotated[list[str], NoDecode, BeforeValidator(_split)] = Field(
        default=[],
        description="Upstream that versions are pulled from, in place of a trainer: the URL of another refitd or of an "
        "object store; of several the next one when one is gone (comma-separated in the environment)",
    )
    follow_token_file: Path | None = Field(default=None, description="File with the bearer token for the upstream")
    follower: str | None = Field(
        default=None,
        min_length=1,
        max_length=200,
        description="Name of this follower at its upstream (default: the host's name and the port)",
    )
    follow_freely: bool = Field(
        default=False,
        description="Go to the run's target at once, by this host's own settings, where the hub would say when",
    )

    @model_validator(mode="after")
    def _check_follow(self) -> "FollowSettings":
        """Refuse upstreams that are none, and settings of a follower without an upstream."""
        for url in self.follow:
            check_upstream(url)
        if not self.follow and (set_ := self.model_fields_set & {"follow_token_file", "follower", "follow_freely"}):
            flag = "--" + min(set_).replace("_", "-")
            raise ValueError(f"{flag} is for a service that follows an upstream: add --follow URL")
        return self

    def identity(self, port: int) -> FollowerIdentity:
        name = self.follower or f"{socket.gethostname()}:{port}"
        return FollowerIdentity(name=name, process=uuid4().hex)
