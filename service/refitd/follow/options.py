"""The settings of `refitd serve` that are about following an upstream."""

import socket
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from refitd.follow.connecting import check_upstream
from refitd.follow.upstream import FollowerIdentity


def _split(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


class FollowSettings(BaseSettings):
    """What is followed, and what this service tells its upstream of itself."""

    model_config = SettingsConfigDict(env_prefix="REFITD_", frozen=True, extra="forbid", hide_input_in_errors=True)

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
    take_followers: bool = Field(
        default=False,
        description="Take followers that report with a URL (their --advertise) as engines of kind refitd: their hosts "
        "are rolled out to as engines are; hosts beyond loopback need --engine-allow",
    )

    def check_follow(self) -> None:
        """Refuse upstreams that are none, and settings of a follower without an upstream.

        Raises:
            ValueError: with a sentence that names the setting.
        """
        for url in self.follow:
            check_upstream(url)
        if not self.follow and (set_ := self.model_fields_set & {"follow_token_file", "follower"}):
            flag = "--" + min(set_).replace("_", "-")
            raise ValueError(f"{flag} is for a service that follows an upstream: add --follow URL")

    def identity(self, port: int, url: str | None) -> FollowerIdentity:
        """What this service tells its upstream of itself.

        Args:
            port: the one that it listens on.
            url: where it can be called; None where the operator does not say.
        """
        name = self.follower or f"{socket.gethostname()}:{port}"
        return FollowerIdentity(name=name, url=url)
