"""API, commands and metrics say what an engine's server is, and what proves the version that it serves."""

import shutil
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from refitd.cli import render
from refitd.engine.fingerprints import proof_by
from refitd.policy.observe import compared
from refitd_client.contract.naming import SERVICE_FOLDER
from refitd_client.contract.states import EngineState
from refitd_client.validation.foreign import MANIFESTS
from support.checkpoints import tensors, write_model
from support.records import engine
from support.services import serving
from support.stand_in_service import make_engine

PROOF = "fingerprints of refitd's plugin"
EQUAL = {
    "version": "Its tensors were compared with the version's own fingerprints, and are equal.",
    "load": "They were compared with those of another load of the version, and are equal.",
}
VLLM = {"server": "vLLM", "server_version": "0.32.0", "stock_reason": "no plugin speaks for it"}


def as_text(shown: object) -> str:
    console = Console(width=200, no_color=True)
    with console.capture() as capture:
        console.print(shown)
    return capture.get()


async def test_the_api_explain_and_metrics_say_vllm_and_what_proves_what_it_serves(tmp_path: Path) -> None:
    async with serving(tmp_path, names=("a", "b")) as stage:
        vllm = stage.engines["a"]
        vllm.server, vllm.release, vllm.proof = "vLLM", "0.32.0", "plugin:xxh3:"
        await stage.served(1)
        listed = {each["id"]: each for each in (await stage.http.get("/v1/engines")).json()["items"]}
        told = {name: (await stage.http.get(f"/v1/explain/{name}")).json()["sentences"] for name in ("a:1", "b:1")}
        text = (await stage.http.get("/metrics")).text
    shown = {name: [each[key] for key in ("server", "server_version", "proof")] for name, each in listed.items()}
    assert shown == {"a:1": ["vLLM", "0.32.0", PROOF], "b:1": ["SGLang", "0.5.23", None]}
    assert "It is vLLM 0.32.0, stock." in told["a:1"]
    assert f"Proof that it serves run~v000001: {PROOF}. {EQUAL['version']}" in told["a:1"]
    assert "It is SGLang 0.5.23, stock." in told["b:1"]
    nothing = "Its tensors were not compared: it names the version's folder and label itself."
    assert f"Proof that it serves run~v000001: none. {nothing}" in told["b:1"]
    labels = {
        sample.labels["engine"]: sample.labels
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "refitd_engine_info"
    }
    expected = {"server": "vLLM", "release": "0.32.0", "plugin": "", "proof": PROOF}
    assert labels["a:1"] == {"run": "run", "engine": "a:1"} | expected


async def test_explain_says_which_way_checkpoints_without_a_manifest_take_and_why_no_better_one(tmp_path: Path) -> None:
    async with serving(tmp_path, names=("a", "b"), settle=0.0) as stage:
        stage.engines["a"].plugin = "0.1.0"
        stage.engines["b"].stock_reason = "no plugin answers for it"
        await stage.until_engines()
        write_model(stage.root / "run/v000001", tensors(1))
        await stage.until("run~v000001", lambda record: record.served_at is not None)
        kept = [(await stage.http.get(f"/v1/explain/{name}")).json()["sentences"] for name in ("a:1", "b:1")]
        shutil.rmtree(stage.root / SERVICE_FOLDER / MANIFESTS)
        (stage.root / SERVICE_FOLDER / MANIFESTS).write_bytes(b"")
        write_model(stage.root / "run/v000002", tensors(2))
        await stage.until("run~v000002", lambda record: record.served_at is not None)
        (told,) = [(await stage.http.get(f"/v1/explain/{name}")).json()["sentences"] for name in ("a:1",)]
        version = (await stage.http.get("/v1/explain/run~v000002")).json()["sentences"]
    assert "It loads through refitd's plugin 0.1.0, checkpoints without refit.json as well." in kept[0]
    alone = "It loads as SGLang does by itself, checkpoints without refit.json as well"
    assert f"{alone}: no plugin answers for it." in kept[1]
    stock = "It loads run~v000002 as SGLang does by itself: that has no manifest, and the service keeps none."
    assert stock in told
    assert stock.replace("000002", "000001") not in kept[0]
    assert any("the service cannot keep a manifest of it (File exists)" in sentence for sentence in version)


async def test_what_the_first_load_of_a_version_has_recorded_proves_later_loads_and_not_that_one(
    tmp_path: Path,
) -> None:
    """One engine after the other: the first has nothing that its answers could be compared with."""
    async with serving(tmp_path, names=("a", "b"), strategy="rolling") as stage:
        for vllm in stage.engines.values():
            vllm.server, vllm.release, vllm.proof = "vLLM", "0.32.0", "vllm-answers:"
        await stage.served(1)
        listed = {each["id"]: each["proof"] for each in (await stage.http.get("/v1/engines")).json()["items"]}
        told = [(await stage.http.get(f"/v1/explain/{name}")).json()["sentences"] for name in ("a:1", "b:1")]
    first = "answers to a fixed prompt (recorded, not yet compared)"
    assert sorted(listed.values()) == ["answers to a fixed prompt", first]
    later = "No other load of the version was on record: what this one gave is what later loads have to give."
    assert sum(f"Proof that it serves run~v000001: {first}. {later}" in each for each in told) == 1
    equal = f"Proof that it serves run~v000001: answers to a fixed prompt. {EQUAL['load']}"
    assert sum(equal in each for each in told) == 1
    assert not any("was proved" in sentence for each in told for sentence in each)  # of a load that only recorded


def test_tables_say_the_server_where_one_is_not_sglang() -> None:
    stock = make_engine("a", **VLLM, proof="digests of parameters")
    plugged = make_engine("b", server="vLLM", server_version="0.32.0", plugin="0.1.0", proof=proof_by("plugin:xxh3:1"))
    sglang = make_engine("c", server="SGLang", server_version="0.5.23")
    listed = as_text(render.engines_table([stock, plugged, sglang], {}))
    for row, words in zip(
        listed.splitlines()[2:],
        (["vLLM 0.32.0", "digests", "stock"], ["vLLM 0.32.0", "fingerprints", "plugin"], ["SGLang 0.5.23", "-"]),
        strict=True,
    ):
        assert all(word in row for word in words), listed
    first = make_engine("a", **VLLM, proof=proof_by("vllm-answers:-:-1.0", recorded=True))
    assert "recorded" in as_text(render.engines_table([first], {})).splitlines()[2]
    assert "SERVER" not in as_text(render.engines_table([sglang, make_engine("d")], {}))


def test_a_stock_server_in_which_no_plugin_is_looked_for_is_said_to_load_by_itself() -> None:
    """As with adapters, which are the server's own."""
    told = engine(server="vLLM", server_version="0.32.0")
    assert told.how_it_loads == "loads as vLLM does by itself"


def test_what_was_known_of_a_server_that_does_not_answer_is_said_in_the_past() -> None:
    gone = engine(server="vLLM", server_version="0.32.0", state=EngineState.UNREACHABLE)
    assert gone.what_it_is == "was vLLM 0.32.0, stock, when it was last reached"


@pytest.mark.parametrize(
    ("fingerprint", "proof"),
    [
        ("plugin:xxh3:1", "fingerprints of refitd's plugin"),
        ("vllm:xxh3:1", "digests of parameters"),
        ("vllm-answers:-:-1.0", "answers to a fixed prompt"),
        ("xxh3:1", "checksums of tensors"),
        (None, None),
    ],
)
def test_each_kind_of_fingerprint_has_words(fingerprint: str | None, proof: str | None) -> None:
    assert proof_by(fingerprint) == proof


def test_an_engine_that_was_away_has_the_proof_of_the_record_that_it_agrees_with() -> None:
    away = engine(serving="run~v000001", state=EngineState.IN_SYNC)
    assert compared(away, "vllm:xxh3:1", "vllm:xxh3:1", None).contents.proof == "digests of parameters"
    first = away.having(proof=proof_by("vllm:xxh3:1", recorded=True))
    assert compared(first, "vllm:xxh3:1", "vllm:xxh3:1", None) == first, "it agrees with what it has recorded itself"
    assert compared(away, None, "vllm:xxh3:1", None).contents.proof is None
    assert compared(away, "vllm:xxh3:1", None, None).serving is None
