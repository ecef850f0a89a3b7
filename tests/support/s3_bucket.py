"""What obstore does not do at a server with S3's API, by signed requests: make a bucket, list uploads in parts."""

import hashlib
import hmac
from datetime import UTC, datetime
from urllib.parse import urlsplit

import httpx


def make_bucket(endpoint: str, bucket: str, key: str, secret: str, region: str = "us-east-1") -> None:
    """Make a bucket."""
    signed("PUT", endpoint, f"/{bucket}", "", key, secret, region)


def signed(
    method: str, endpoint: str, path: str, query: str, key: str, secret: str, region: str = "us-east-1"
) -> httpx.Response:
    """Send a request without a body that is signed as AWS Signature Version 4 says. Raises httpx.HTTPStatusError."""
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    empty = hashlib.sha256(b"").hexdigest()
    headers = {"host": urlsplit(endpoint).netloc, "x-amz-content-sha256": empty, "x-amz-date": now}
    names = ";".join(sorted(headers))
    lines = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
    request = f"{method}\n{path}\n{query}\n{lines}\n{names}\n{empty}"
    scope = f"{now[:8]}/{region}/s3/aws4_request"
    to_sign = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    signing = b"AWS4" + secret.encode()
    for part in (now[:8], region, "s3", "aws4_request", to_sign):
        signing = hmac.digest(signing, part.encode(), "sha256")
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={key}/{scope}, SignedHeaders={names}, Signature={signing.hex()}"
    )
    url = f"{endpoint}{path}" + (f"?{query}" if query else "")
    return httpx.request(method, url, headers=headers, trust_env=False).raise_for_status()
