"""What a probe or a refit says about an engine."""

from dataclasses import replace

from refitd.engine.port import UNNAMED, Outcome, Process, Reached, Refit, Unreached
from refitd.policy.observe import QUARANTINE_AFTER, Expected, after_probe, after_refit
from refitd_client.contract.states import EngineState
from support.records import engine

NOW = 100.0
SERVES_7 = Expected(path="/root/run/v000007", label="7")


def reached(path: str = "/root/run/v000007", label: str = "7", startup: str | None = "/base") -> Reached:
    return Reached(
        model_path=path, weight_version=label, server_version="0.5.23", configuration="c", startup_path=startup
    )


def test_an_engine_that_tells_its_label_alone_serves_what_the_label_belongs_to() -> None:
    after = after_probe(engine(serving="v7"), reached(path=UNNAMED), SERVES_7, "v7", NOW)
    assert (after.state, after.serving, after.contents.model_path) == (EngineState.IN_SYNC, "v7", SERVES_7.path)
    other = after_probe(engine(serving="v7"), reached(path=UNNAMED, label="8"), SERVES_7, "v7", NOW)
    assert (other.serving, other.contents.model_path) == (None, UNNAMED)


def test_an_engine_that_does_not_answer_is_unreachable_since_the_first_time() -> None:
    once = after_probe(engine(serving="v7"), Unreached(reason="connection refused"), SERVES_7, "v7", NOW)
    twice = after_probe(once, Unreached(reason="connection refused"), SERVES_7, "v7", NOW + 9)
    assert (twice.state, twice.trouble.unreachable_since, twice.serving) == (EngineState.UNREACHABLE, NOW, "v7")


def test_an_engine_that_is_back_from_a_network_cut_is_not_loaded_again() -> None:
    away = engine(state=EngineState.UNREACHABLE, serving="v7", unreachable_since=NOW)
    after = after_probe(away, reached(), SERVES_7, "v7", NOW + 9)
    assert (after.state, after.trouble.unreachable_since) == (EngineState.IN_SYNC, None)


def test_an_engine_that_does_not_hear_that_it_may_go_on_is_looked_at_first() -> None:
    """It may have died with the call: what is there now would be called in sync with what died."""
    after = after_refit(engine(state=EngineState.VERIFYING), "v7", Refit(outcome=Outcome.ACK, resumed=False), NOW)
    assert (after.state, after.serving, after.debts.resume_owed) == (EngineState.PROBING, "v7", True)


def test_an_engine_that_answers_again_has_no_old_reason_any_more() -> None:
    for run in ("run", None):
        away = engine(run=run, state=EngineState.UNREACHABLE, serving="v7", known=True, reason="connection refused")
        assert after_probe(away, reached(), SERVES_7, "v7", NOW).reason is None


def test_a_tainted_engine_stays_tainted_whatever_its_label_says() -> None:
    tainted = engine(state=EngineState.UNREACHABLE, known=False, failures=1)
    after = after_probe(tainted, reached(), SERVES_7, "v7", NOW)
    assert (after.state, after.known) == (EngineState.TAINTED, False)


def test_what_an_engine_held_when_the_service_died_counts_until_a_load_fails_or_is_proved() -> None:
    cut_off = engine(state=EngineState.TAINTED, known=False, held="v6")
    assert after_refit(cut_off, "v7", Refit(outcome=Outcome.UNREACHABLE, resumed=False), NOW).contents.held == "v6"
    assert after_refit(cut_off, "v7", Refit(outcome=Outcome.TAINTED, resumed=False), NOW).contents.held is None
    assert after_refit(cut_off, "v7", Refit(outcome=Outcome.ACK, resumed=True), NOW).contents.held is None


def test_a_quarantined_engine_that_was_restarted_is_brought_up_again() -> None:
    quarantined = engine(state=EngineState.QUARANTINED, known=False, taints=QUARANTINE_AFTER)
    seen = after_probe(quarantined, reached(), None, "v7", NOW)
    assert seen.state is EngineState.QUARANTINED
    after = after_probe(seen, reached("/base", "default"), None, "v7", NOW)
    assert (after.state, after.known, after.trouble.taints) == (EngineState.TAINTED, False, 0)
    away = after_probe(seen, Unreached(reason="refused"), None, "v7", NOW)
    assert after_probe(away, reached(), None, "v7", NOW).state is EngineState.TAINTED


def test_why_an_engine_was_given_up_or_did_not_answer_is_not_said_of_its_next_process() -> None:
    first, second = Process(started="one"), Process(started="two")
    broken = engine(state=EngineState.QUARANTINED, known=False, taints=QUARANTINE_AFTER, process=first, reason="torn")
    still = after_probe(broken, replace(reached(), process=first), None, "v7", NOW)
    assert (still.state, still.reason) == (EngineState.QUARANTINED, "torn")
    anew = after_probe(broken, replace(reached(), process=second), None, "v7", NOW)
    assert (anew.state, anew.known, anew.trouble.taints) == (EngineState.TAINTED, False, 0)
    assert "it was restarted since" in (anew.reason or "")
    away = after_probe(broken, Unreached(reason="refused"), None, "v7", NOW)
    again = after_probe(away, replace(reached(), process=first), None, "v7", NOW)
    assert "it has answered again since" in (again.reason or "")
    assert anew.contents.held is None, "the loads that failed may have run in that process"


def test_a_quarantined_engine_that_names_its_start_up_model_is_not_known_because_of_that() -> None:
    """SGLang changes the name only when a load goes well: this one has failed four, and was never restarted."""
    broken = engine(state=EngineState.IN_SYNC, model_path="/base")
    for _ in range(QUARANTINE_AFTER):
        broken = after_refit(broken, "v7", Refit(outcome=Outcome.TAINTED, resumed=False), NOW)
    assert broken.state is EngineState.QUARANTINED
    for _ in range(2):
        broken = after_probe(broken, reached("/base", "default"), None, "v7", NOW)
        assert (broken.state, broken.known) == (EngineState.QUARANTINED, False)


def test_refusals_do_not_count_towards_a_quarantine() -> None:
    refused = engine()
    for _ in range(9):
        refused = after_refit(refused, "v7", Refit(outcome=Outcome.NACK, resumed=True), NOW)
    assert after_refit(refused, "v7", Refit(outcome=Outcome.TAINTED, resumed=False), NOW).state is EngineState.TAINTED


def test_a_resume_that_is_owed_is_not_paid_by_a_call_that_was_never_sent() -> None:
    owed = after_refit(engine(), "v7", Refit(outcome=Outcome.NACK, resumed=False), NOW)
    assert after_refit(owed, "v7", Refit(outcome=Outcome.UNREACHABLE, resumed=True), NOW).debts.resume_owed


def test_a_clean_load_of_another_version_does_not_forgive_a_version_that_breaks_the_engine() -> None:
    broken = after_refit(engine(), "v7", Refit(outcome=Outcome.TAINTED, resumed=False), NOW)
    repaired = after_refit(broken, "v6", Refit(outcome=Outcome.ACK, resumed=True), NOW)
    assert repaired.trouble.strikes == {"v7": 1}
    assert after_refit(repaired, "v7", Refit(outcome=Outcome.ACK, resumed=True), NOW).trouble.strikes == {}


def test_an_acknowledged_refit_makes_the_engine_serve_the_version() -> None:
    after = after_refit(engine(failures=2), "v7", Refit(outcome=Outcome.ACK, resumed=True), NOW)
    assert (after.state, after.serving, after.known, after.trouble.failures) == (EngineState.IN_SYNC, "v7", True, 0)
    assert not after.debts.resume_owed


def test_an_acknowledged_engine_that_could_not_be_resumed_is_owed_a_resume() -> None:
    assert after_refit(engine(), "v7", Refit(outcome=Outcome.ACK, resumed=False), NOW).debts.resume_owed


def test_a_refused_refit_leaves_the_engine_on_what_it_served() -> None:
    after = after_refit(engine(serving="v6"), "v7", Refit(outcome=Outcome.NACK, resumed=True, reason="no"), NOW)
    assert (after.state, after.serving, after.known) == (EngineState.NACKED, "v6", True)


def test_a_failure_past_the_start_of_a_load_makes_the_contents_unknown() -> None:
    after = after_refit(engine(serving="v6"), "v7", Refit(outcome=Outcome.TAINTED, resumed=False), NOW)
    assert (after.state, after.serving, after.known) == (EngineState.TAINTED, None, False)


def test_what_an_engine_named_before_a_load_that_failed_is_not_forgotten_until_it_is_asked() -> None:
    """A copy that it may still name is not written again: its server "rolls back" by reading what it names."""
    tainted = Refit(outcome=Outcome.TAINTED, resumed=False)
    after = after_refit(engine(serving="v6", model_path="/root/copies/a"), "v7", tainted, NOW)
    again = after_refit(after, "v5", tainted, NOW)
    assert (after.paths, again.paths) == (("/root/copies/a",), ("/root/copies/a",))
    assert after_probe(again, reached("/root/copies/b"), None, None, NOW).paths == ("/root/copies/b",)
    assert after_refit(again, "v5", Refit(outcome=Outcome.ACK, resumed=True), NOW).paths == ()


def test_an_engine_that_went_away_before_the_load_keeps_what_it_served() -> None:
    after = after_refit(engine(serving="v6"), "v7", Refit(outcome=Outcome.UNREACHABLE, resumed=False), NOW)
    assert (after.state, after.serving, after.debts.resume_owed) == (EngineState.UNREACHABLE, "v6", True)
