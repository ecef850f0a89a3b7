"""Which offers are for an engine without refitd inside: those that its trainer sends over a process group."""

from refitd.policy.goals import PendingOffer, offered_to, takers
from refitd.policy.strategy import Strategy, StrategyName
from refitd_client.contract.receivers import StockReceiver
from refitd_client.contract.states import EngineState, VersionState
from support.records import engine, version

RECEIVER = StockReceiver(engine="", url="http://a", ranks=1, device="cpu")
STOCK = engine("a", stock_receiver=RECEIVER, state=EngineState.IN_SYNC)
OTHER = engine("b", state=EngineState.IN_SYNC)
SENT = version(2, state=VersionState.ANNOUNCED, metadata={"transport": "gloo"})
HANDED = version(3, state=VersionState.ANNOUNCED)
ALL = Strategy(name=StrategyName.ALL)


def test_what_is_sent_over_a_group_is_for_stock_engines_that_may_join_one_and_a_hand_over_is_not() -> None:
    assert takers(ALL, [STOCK, OTHER], SENT, paused=False) == {"a"}
    assert takers(ALL, [STOCK, OTHER], HANDED, paused=False) == frozenset()
    offer = PendingOffer(version=SENT.id, path="run/.offer", waiting=frozenset({"a"}))
    assert offered_to(STOCK, offer, {SENT.id: SENT}) == offer
    assert offered_to(OTHER, offer, {SENT.id: SENT}) is None
    handed = PendingOffer(version=HANDED.id, path="run/.offer", waiting=frozenset({"a"}))
    assert offered_to(STOCK, handed, {HANDED.id: HANDED}) is None
