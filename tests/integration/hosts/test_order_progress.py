"""What a hub shows of a host while that carries out an order: it is no standstill, and neither is the picture."""

import json
from pathlib import Path

import numpy as np

from refitd.text import size_of
from refitd_client.contract.manifest import BLOCK
from refitd_client.contract.states import EngineState, WaitOutcome
from refitd_client.contract.wire import Engine
from support.checkpoints import Tensors, write_model
from support.command_line import refitd
from support.hosts import RUN, Host, hosts, until
from support.proxy import Hold, Proxy

UNDER_WAY = 4
FIRST, SECOND = f"{RUN}~v000001", f"{RUN}~v000002"
FILE = f"/v1/versions/{FIRST}/files/model-00001-of-00001.safetensors"


def large() -> Tensors:
    values = np.random.default_rng(1).standard_normal(BLOCK // 2, np.float32)
    return {"layer.0.weight": values.reshape(1, -1)}


def at_hub(hub: Host) -> Engine:
    return hub.client.engine("one")


def shown(command: str, hub: Host) -> str:
    """What a command prints for people, without the ends of lines."""
    return " ".join(refitd(*command.split(), "--url", hub.refitd.url).stdout.split())


def test_while_a_host_pulls_what_was_ordered_its_hub_says_how_much_of_it_has_come(tmp_path: Path) -> None:
    weights = large()
    base = str(write_model(tmp_path / "larger", weights))
    with hosts(tmp_path, "--base-model", base) as all_, Proxy(all_.hub.refitd.port) as proxy:
        holds = [Hold() for _ in range(60)]  # also of what is asked for again meanwhile
        proxy.plan(FILE, *holds)
        hub, one = all_.hub, all_.led("one", "--base-model", base, url=proxy.url)
        until(lambda: [each.id for each in hub.client.engines().items] == ["one"], hub, one)
        all_.publish(1, weights)
        holds[0].until_arrived()
        holds[0].release()
        holds[UNDER_WAY].until_arrived()  # and so nothing more comes
        come = one.following()["pulled_bytes"]

        def is_known() -> bool:
            host = at_hub(hub).host
            return host is not None and host.pulling == FIRST and host.pulled_bytes == come

        until(is_known, hub, one)
        pulls = f"pulls {FIRST} ({size_of(come)} of {size_of(hub.client.version(FIRST).bytes or 0)})"
        assert come > 0
        assert (at_hub(hub).state, at_hub(hub).reason) == (EngineState.UPDATING, pulls)
        assert f"Now the host {pulls}." in hub.client.explain("one").sentences
        assert f"one is UPDATING: one {pulls}" in hub.client.overview().runs[0].reasons
        assert f"{pulls}; engines there: 1 in sync" in shown("status", hub)
        assert f"{pulls}; engines there: 1 in sync" in shown("engines", hub)
        assert f"one is UPDATING: one {pulls}" in shown("top --once", hub)
        for hold in holds:
            hold.release()
        assert hub.client.wait(FIRST, timeout=30).outcome is WaitOutcome.SERVED
        load = at_hub(hub).last_attempt
        assert load is not None
        assert load.timings["prepare"] > load.timings["load"]


def test_while_the_engines_of_a_host_load_its_hub_says_so_and_shows_their_states(tmp_path: Path) -> None:
    with hosts(tmp_path) as all_:
        hub, one = all_.hub, all_.led("one", engines=2)
        until(lambda: [each.id for each in hub.client.engines().items] == ["one"], hub, one)
        assert hub.client.wait(all_.publish(1), timeout=30).outcome is WaitOutcome.SERVED
        for engine in one.engines:
            engine.may_load.clear()
        all_.publish(2)

        def states() -> dict[EngineState, int]:
            host = at_hub(hub).host
            return {} if host is None else dict(host.states)

        until(lambda: states() == {EngineState.UPDATING: 2}, hub, one)
        assert (at_hub(hub).state, at_hub(hub).reason) == (EngineState.UPDATING, f"loads {SECOND}")
        assert f"Now the host loads {SECOND}." in hub.client.explain("one").sentences
        listed = json.loads(refitd("engines", "--json", "--url", hub.refitd.url).stdout)["items"]
        assert [each["host"]["loading"] for each in listed] == [SECOND]
        one.engines[0].may_load.set()
        moved = {EngineState.UPDATING: 1, EngineState.IN_SYNC: 1}
        until(lambda: states() == moved, hub, one)
        assert f"loads {SECOND}; engines there: 1 updating, 1 in sync" in shown("status", hub)
        one.engines[1].may_load.set()
        assert hub.client.wait(SECOND, timeout=30).outcome is WaitOutcome.SERVED
        assert states() == {EngineState.IN_SYNC: 2}
        assert at_hub(hub).reason is None
