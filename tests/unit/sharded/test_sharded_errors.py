"""What ranks say of an error on one of them."""

import pytest

from refitd_client.sharded.layout import ranks_named
from refitd_client.sharded.rank_group import reason_of

ADVICE = (
    "This is typically caused by a remote worker crashing. Check the logs of the remote worker before reporting an "
    "error. GLHF! \U0001f3d6\ufe0f"
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            f"[/w/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9132. {ADVICE}",
            "Connection closed by peer [127.0.0.1]:9132",
        ),
        (
            f"[/w/gloo/pair.cc:537] Read error [::1]:17570: Connection reset by peer. {ADVICE}\nmore",
            "Read error [::1]:17570: Connection reset by peer",
        ),
        (
            "[/w/gloo/unbound_buffer.cc:78] Timed out waiting 999ms for recv operation to complete",
            "Timed out waiting 999ms for recv operation to complete",
        ),
        ("Invalid rank. It is 7", "Invalid rank. It is 7"),
        (f"[/w/pair.cc:1] {ADVICE}", "RuntimeError"),
        ("", "RuntimeError"),
    ],
)
def test_of_a_lost_connection_gloo_s_reason_is_told_and_not_its_advice(text: str, reason: str) -> None:
    assert reason_of(RuntimeError(text)) == reason


def test_ranks_are_named_as_a_sentence_names_them() -> None:
    named = [ranks_named(each) for each in ([1], [1, 0], {2: "late", 0: "gone", 1: "late"})]
    assert named == ["rank 1", "ranks 0 and 1", "ranks 0, 1 and 2"]
