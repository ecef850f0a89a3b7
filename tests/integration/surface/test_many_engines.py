"""What is read of a service with many engines: each engine as it is now, and not a thousand of them fifty times."""

from pathlib import Path

import msgspec

from refitd.api.overview import Fragments
from refitd.explain.present import present_engine
from refitd_client.contract.wire import Engine
from refitd_hosts.policy.upstream import UpstreamWord
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
