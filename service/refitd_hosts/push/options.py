"""The settings of `refitd serve` that are about pushing to an object store."""

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from refitd_client.bucket.objects import Bucket
from refitd_client.contract.stores import is_bucket_url
from refitd_client.errors import BucketError


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
