"""Doctor, run where a follower is to start: a real hub with tokens says whether it would take it."""

import json
from pathlib import Path

from support.checkpoints import publish, tensors, write_model
from support.command_line import refitd
from support.servers import RefitdServer

TOKEN = "a-token-that-follows-0123456789"


def test_a_follower_that_does_not_run_is_told_of_its_hub(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base")
    (tmp_path / "hub/root").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    for name, token in (("followers", TOKEN), ("wrong", TOKEN[::-1]), ("write", "another-token-0123456789")):
        (tmp_path / name).write_text(token)
    publish(tmp_path / "hub/root", "run", 1, tensors(1))
    keys = ("--followers-token-file", str(tmp_path / "followers"), "--token-file", str(tmp_path / "write"))
    with RefitdServer(tmp_path / "hub", tmp_path / "hub/root", [], "--base-model", str(base), *keys) as hub:

        def told(token: str) -> list[tuple[str, str]]:
            at = ("doctor", "--json", "--root", str(tmp_path / "here"), "--base-model", str(base), "--follow", hub.url)
            found = json.loads(refitd(*at, "--follow-token-file", str(tmp_path / token)).stdout)["findings"]
            return [(each["verdict"], each["text"]) for each in found if each["check"] == "upstream"]

        answers = ("ok", "the hub answers, and takes this token, or none")
        assert told("followers") == [answers, ("ok", "the hub has the run to follow: run")]
        refused = "the hub answers, and does not take this token for a follower's reports (401)"
        assert told("wrong")[0] == ("failed", refused), "to look it needs none"
