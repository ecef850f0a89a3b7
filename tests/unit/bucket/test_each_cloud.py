"""Each cloud's URL opens a store of that cloud, with the prefix in it. Nothing is asked of it."""

import pytest
from obstore.store import AzureStore, GCSStore, S3Store

from refitd_client.bucket.address import open_store, parse_bucket_url

VARIABLES = {"AZURE_STORAGE_ACCOUNT_NAME": "somebody", "AWS_REGION": "eu-west-1"}


@pytest.mark.parametrize(("url", "kind"), [("s3", S3Store), ("gs", GCSStore), ("az", AzureStore)])
def test_a_url_opens_a_store_of_its_cloud_below_its_prefix(
    url: str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    store = open_store(parse_bucket_url(f"{url}://bucket/a/prefix/"))
    assert type(store) is kind
    assert store.prefix == "a/prefix"
