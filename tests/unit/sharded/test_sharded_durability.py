"""Which versions of several ranks get files: what all have to say alike, and where files are needed."""

import pytest

from refitd_client.contract.plugin import Receiver, Receivers
from refitd_client.errors import PublishError
from refitd_client.publish.options import PublishOptions
from refitd_client.publish.route import decide_route
from refitd_client.sharded.orders import Opening
from refitd_client.sharded.publisher import agree
from refitd_client.ways import TrainerPlace, Transport

INSIDE = Receiver(engine="c", rank=0, name="c-0", host="h", boot="b", backends=["gloo"])
PLACES = [
    TrainerPlace(host="h", boot="b", devices=frozenset(), shared=False, backends=frozenset({"gloo"}), is_rank=True)
] * 2


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_to_engines_without_refitd_inside_ranks_send_nothing_and_files_go(transport: Transport) -> None:
    route = decide_route(transport, PLACES, Receivers(receivers=[], others=["a"]), "service")
    assert route.choice.transport == "disk"


def test_where_an_engine_has_refitd_inside_no_files_are_needed() -> None:
    assert decide_route("gloo", PLACES, Receivers(receivers=[INSIDE]), "service").choice.transport == "gloo"


def test_ranks_that_do_not_say_the_same_are_both_named() -> None:
    openings = [Opening(step=1, layout=0, claims=[], samples={}, durable=each) for each in ("always", "never")]
    with pytest.raises(PublishError, match="rank 1 asks for durable='never' and rank 0 for 'always'"):
        agree(openings, None, PublishOptions(), lambda: None)
