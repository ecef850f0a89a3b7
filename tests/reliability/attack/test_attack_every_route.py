"""Every route, with names, numbers and headers that no client sends: each is answered, and none by a 500.

`test_attack_schema.py` asks what the document allows, at length; here is what falls between its lines.
"""

import re
from itertools import product
from pathlib import Path
from typing import Any

from structlog.testing import capture_logs

from support.checkpoints import publish, tensors
from support.services import serving

DIGITS = "9" * 5000
KNOWN = "run~v000001"
NAMES = [DIGITS, f"run~v{DIGITS}", "%00", "%ff%fe", "%ed%a0%80", "a" * 5000, "..%2f..%2fetc", "%F0%9F%92%A9"]
NAMES += ["run~v000001.g0", "~", "%0d%0aX:%20y", "http:%2f%2f[", "127.0.0.1:99999999", "-1", KNOWN]
VALUES = ["", DIGITS, "-1", "1e400", "NaN", "%00", "%ff", "%ed%a0%80", str(2**63), "true", "[]", "http://["]
HEADERS = ["range", "host", "origin", "content-length", "content-type", "authorization"]
SAID = [DIGITS, f"bytes={DIGITS}-", f"bytes=0-{DIGITS}", "-1", "\xb2", "", "http://[", "Bearer \xff", "bytes=-", ","]
BODIES = [b"", b"[]", b"null", DIGITS.encode(), b'{"run":%b}' % DIGITS.encode(), b'{"run":"\\u0000"}', b"\xff", b'"a"']
ENDLESS = "/v1/events"


def requests(path: str, method: str, parameters: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """What is asked of one operation: addresses, and what is sent beside them."""
    named = re.sub(r"\{[^}]*\}", KNOWN, path)
    found: list[tuple[str, dict[str, Any]]] = [(re.sub(r"\{[^}]*\}", name, path), {}) for name in NAMES]
    found += [(f"{named}?{name}={value}&timeout=0", {}) for name, value in product(parameters, VALUES)]
    found += [(f"{named}?timeout=0", {"headers": {h: said.encode("latin-1")}}) for h, said in product(HEADERS, SAID)]
    if method in {"post", "put"}:
        found += [(named, {"content": body, "headers": {"content-type": "application/json"}}) for body in BODIES]
    return found


async def test_no_path_number_or_header_is_answered_by_a_500(tmp_path: Path) -> None:
    async with serving(tmp_path) as stage:
        publish(stage.root, "run", 1, tensors(1))
        await stage.listed()
        failed: set[tuple[str, str]] = set()
        with capture_logs():
            for path, operations in stage.api.openapi()["paths"].items():
                for method, operation in operations.items():
                    parameters = [each["name"] for each in operation.get("parameters", []) if each["in"] == "query"]
                    for address, more in requests(path, method, parameters) if path != ENDLESS else []:
                        answer = await stage.http.request(method, address, **more)
                        if answer.status_code == 500:
                            failed.add((f"{method} {address[:80]}", str(more)[:80]))
            for said in SAID:
                answer = await stage.http.get(f"{ENDLESS}?", headers={b"last-event-id": said.encode("latin-1") + b"x"})
                assert answer.status_code == 422
        assert failed == set()
