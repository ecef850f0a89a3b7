"""Makes a bucket at a server with S3's API, which obstore does not: one signed request."""

import hashlib
import hmac
from datetime import UTC, datetime
from urllib.parse import urlsplit

import httpx


def make_bucket(endpoint: str, bucket: str, key: str, secret: str, region: str = "us-east-1") -> None:
    """Make a bucket, by a request that is signed as AWS Signature Version 4 says."""
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    empty = hashlib.sha256(b"").hexdigest()
    headers = {"host": urlsplit(endpoint).netloc, "x-amz-content-sha256": empty, "x-amz-date": now}
    names = ";".join(sorted(headers))
    lines = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
    request = f"PUT\n/{bucket}\n\n{lines}\n{names}\n{empty}"
    scope = f"{now[:8]}/{region}/s3/aws4_request"
    to_sign = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    signing = b"AWS4" + secret.encode()
    for part in (now[:8], region, "s3", "aws4_request", to_sign):
        signing = hmac.digest(signing, part.encode(), "sha256")
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={key}/{scope}, SignedHeaders={names}, Signature={signing.hex()}"
    )
    httpx.put(f"{endpoint}/{bucket}", headers=headers).raise_for_status()
