"""What is read of a service with many engines: each engine as it is now, and not a thousand of them fifty times."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from refitd.api import overview
from refitd.api.overview import Fragments
from refitd.explain.present import present_engine
from refitd.state.faults import UpstreamWord
from refitd_client.contract.wire import Engine, Page, Version
from support.records import engine
from support.services import serving

NAMES = ("a", "b", "c")


async def test_engines_in_json_are_what_they_are_now_after_whatever_has_changed(tmp_path: Path) -> None:
    async with serving(tmp_path, names=NAMES) as stage:
        store, targets = stage.store, stage.targets
        kept = Fragments()

        def check() -> None:
            found = kept.of(store.engines.values(), store, targets)
            fresh = [present_engine(each, store, targets) for each in store.engines.values()]
            assert [msgspec.json.decode(each, type=Engine) for each in found] == fresh

        check()
        await stage.served(1)
        check()
        store.put_engine(store.engines["a:1"].having(reason="as an operator was told"))
        check()
        await stage.http.post("/v1/runs", json={"run": "run", "paused": True})
        store.put_version(store.versions["run~v000001"].having(pinned=True))
        check()
        store.runs.upstream = UpstreamWord(name="http://hub", run="run", silent_since="")
        check()
        store.drop_engine("b:1")
        check()


async def test_an_engine_that_has_not_changed_is_not_encoded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, names=NAMES) as stage:
        await stage.served(1)
        kept, made = Fragments(), list[str]()

        def counted(record: object, *rest: object) -> Engine:
            made.append(str(record))
            return present_engine(record, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(overview, "present_engine", counted)
        kept.of(stage.store.engines.values(), stage.store, stage.targets)
        assert len(made) == len(NAMES)
        stage.store.put_engine(stage.store.engines["a:1"].having(skipped=7))
        kept.of(stage.store.engines.values(), stage.store, stage.targets)
        assert len(made) == len(NAMES) + 1


async def test_versions_are_listed_without_engines_where_these_are_not_wanted(tmp_path: Path) -> None:
    async with serving(tmp_path, names=NAMES) as stage:
        await stage.served(1)
        stage.store.put_engine(engine("elsewhere", run="other"))
        whole = msgspec.json.decode((await stage.http.get("/v1/versions")).content, type=Page[Version])
        bare = msgspec.json.decode((await stage.http.get("/v1/versions?engines=false")).content, type=Page[Version])
        assert [each.id for each in whole.items[0].engines] == ["a:1", "b:1", "c:1"]
        assert bare == Page(items=[replace(each, engines=[]) for each in whole.items])
