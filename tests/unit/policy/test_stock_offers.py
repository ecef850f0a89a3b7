"""Which offers are for an engine without refitd inside: those that its trainer sends over a process group. And what
proves that it serves one.
"""

from refitd.engine.fingerprints import SENT_PROOF
from refitd.engine.port import Outcome, Refit
from refitd.policy.goals import PendingOffer, offered_to, takers
from refitd.policy.observe import after_refit, proved
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


def test_what_was_compared_with_what_was_sent_needs_no_other_load_and_has_to_agree_with_one() -> None:
    refit = Refit(outcome=Outcome.ACK, resumed=True, fingerprint="xxh3:1", proof=SENT_PROOF)
    loaded = after_refit(STOCK, SENT.id, refit, 0.0)
    assert proved(loaded, "xxh3:1", None).proof == SENT_PROOF
    assert proved(loaded, "xxh3:1", "xxh3:1").proof == SENT_PROOF
    assert proved(loaded, "xxh3:1", "xxh3:2").serving is None


def test_a_broken_transfer_is_no_strike_against_the_version() -> None:
    broken = Refit(outcome=Outcome.TAINTED, resumed=False, reason="received over a group: no", overwritten=True)
    after = after_refit(STOCK, SENT.id, broken, 0.0)
    assert (after.state, after.known, after.strikes) == (EngineState.TAINTED, False, {})
