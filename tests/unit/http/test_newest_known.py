"""The question that a publisher asks before its first publication: which root is watched, and which steps are known."""

import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from refitd_client.errors import ConflictError
from refitd_client.http.connection import Connection
from refitd_client.http.publisher_client import newest_known
from support.scripted_server import answer, serve

PAGE = {"items": [], "total": 0, "root": "the name of another root", "folder": "/elsewhere"}


def test_a_service_that_takes_its_time_is_heard_before_anything_is_written_into_a_wrong_root(tmp_path: Path) -> None:
    def slowly(handler: BaseHTTPRequestHandler) -> None:
        threading.Event().wait(1.3)  # longer than a question may take that a trainer asks in each step
        answer(200, PAGE)(handler)

    (tmp_path / "root").mkdir()
    with serve(slowly) as server, pytest.raises(ConflictError, match="which watches /elsewhere"):
        newest_known(Connection(url=server.url), "run", tmp_path / "root")
