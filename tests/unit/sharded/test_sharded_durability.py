"""Which versions of several ranks get files: what all have to say alike, and where files are needed."""

from pathlib import Path

import pytest

from refitd_client.contract.receivers import Receiver, Receivers
from refitd_client.errors import PublishError
from refitd_client.http import publisher_client
from refitd_client.http.connection import Connection
from refitd_client.http.publisher_client import ReceiversQuery
from refitd_client.publish.route import PublishRoute
from refitd_client.sharded.agreement import LeadOptions, agree
from refitd_client.sharded.rank_group import Opening
from refitd_client.sharded.routing import Asked, route_of_ranks
from refitd_client.transport.group.choice import TrainerPlace, Transport

INSIDE = Receiver(engine="c", rank=0, name="c-0", host="h", boot="b", backends=["gloo"])
PLACES = [TrainerPlace(host="h", boot="b", devices=frozenset(), shared=False, backends=frozenset({"gloo"}))] * 2


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Receivers:
    """What the service says there is; tests change it."""
    there = Receivers(receivers=[], others=["a"])

    class Client:
        def __enter__(self) -> "Client":
            return self

        def __exit__(self, *_: object) -> None: ...

        def receivers(self, run: str) -> Receivers:
            return there

    monkeypatch.setattr(publisher_client, "open_client", lambda *_, **__: Client())
    return there


def of(transport: Transport) -> PublishRoute:
    asked = Asked(transport=transport, places=PLACES)
    return route_of_ranks(asked, ReceiversQuery(Connection(url="http://s:1"), "run"))


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_to_engines_without_refitd_inside_ranks_send_nothing_and_files_go(
    found: Receivers, transport: Transport
) -> None:
    assert of(transport).choice.transport == "disk"


def test_where_an_engine_has_refitd_inside_no_files_are_needed(found: Receivers) -> None:
    found.receivers.append(INSIDE)
    assert of("gloo").choice.transport == "gloo"


def test_ranks_that_do_not_say_the_same_are_both_named(tmp_path: Path) -> None:
    options = LeadOptions(
        root=tmp_path,
        run="run",
        connection=None,
        base_model=None,
        max_shard_bytes=None,
        check_finite=True,
        fingerprinted=False,
    )
    openings = [Opening(step=1, layout=0, claims=[], samples={}, durable=each) for each in ("always", "never")]
    with pytest.raises(PublishError, match="rank 1 asks for durable='never' and rank 0 for 'always'"):
        agree(openings, None, options, lambda: None)
