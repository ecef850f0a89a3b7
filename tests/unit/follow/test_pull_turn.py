"""A host pulls from the store that its hub names, or from the hub in turn."""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from refitd.clock import SystemClock
from refitd_client.contract.follow import HostPull
from refitd_client.contract.manifest import parse_manifest
from refitd_hosts.follow.pull_turn import PullTurn, StoreSources, named_wrong
from refitd_hosts.follow.upstream import DamagedError, FilePart, FollowedSources, StoreError, UnreachableError
from support.pulls import V1, FakeSource, Stage, same, with_right_digests

HUB, STORE = "http://hub:8700", "s3://bucket/prefix"


@dataclass
class Upstream(FakeSource):
    name: str = HUB
    leads: bool = True


@dataclass
class Turn:
    """A turn of a host of one hub, and what its reports would wake."""

    root: Path
    leads: bool = True
    sources: FollowedSources = field(init=False)

    def __post_init__(self) -> None:
        self.sources = FollowedSources([Upstream(self.root, leads=self.leads)])  # type: ignore[list-item]
        self.turn = PullTurn(self.sources, SystemClock())
        self.turn.begin(V1)

    def hears(self, ahead: int = 0, store: str = "", version: str = V1) -> None:
        self.turn.heard(HUB, HostPull(version=version, ahead=ahead, store=store))


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")


async def waits(turn: PullTurn) -> bool:
    """Whether nothing may be pulled now."""
    taking = asyncio.create_task(turn.taken())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    is_waiting = not taking.done()
    taking.cancel()
    return is_waiting


async def test_a_host_pulls_from_its_hub_when_none_is_before_it(tmp_path: Path) -> None:
    one = Turn(tmp_path)
    assert await waits(one.turn)
    one.hears(ahead=2)
    assert one.turn.ahead == 2
    assert await waits(one.turn)
    one.hears(ahead=0, version="run~v000009")  # of another pull
    assert await waits(one.turn)
    told = one.sources.told.count
    one.hears(ahead=0)
    assert await one.turn.taken() is None
    assert (one.turn.source, one.turn.ahead) == (HUB, None)
    assert one.sources.told.count > told


async def test_an_upstream_that_gives_no_turns_or_takes_no_reports_is_pulled_from_at_once(tmp_path: Path) -> None:
    assert await Turn(tmp_path, leads=False).turn.taken() is None
    older = Turn(tmp_path)
    older.turn.heard(HUB, None)
    assert await older.turn.taken() is None


@pytest.mark.usefixtures("credentials")
async def test_a_host_that_waits_goes_to_a_store_as_soon_as_the_hub_names_it(tmp_path: Path) -> None:
    one = Turn(tmp_path)
    one.hears(ahead=3)
    taking = asyncio.create_task(one.turn.taken())
    await asyncio.sleep(0)
    one.hears(ahead=3, store=STORE)
    sources = await taking
    assert isinstance(sources, StoreSources)
    assert (one.turn.source, one.turn.ahead, one.turn.store_fault) == (STORE, None, None)


@pytest.mark.usefixtures("credentials")
async def test_a_store_that_failed_is_said_and_not_asked_for_a_while_and_the_hub_is_pulled_from_in_turn(
    tmp_path: Path,
) -> None:
    one = Turn(tmp_path)
    one.hears(store=STORE)
    assert await one.turn.taken() is not None
    one.turn.leave(STORE, StoreError("it is gone"))
    one.hears(ahead=1, store=STORE)
    assert one.turn.store_fault == "it is gone"
    assert await waits(one.turn)
    one.hears(ahead=0, store=STORE)
    assert await one.turn.taken() is None
    assert one.turn.store_fault == "it is gone"


@pytest.mark.parametrize("variable", ["AWS_ACCESS_KEY_ID", "AZURE_STORAGE_ACCOUNT_NAME", "GOOGLE_SERVICE_ACCOUNT"])
def test_a_host_asks_a_store_of_the_clouds_alone_that_its_own_environment_names(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = {"AWS": "s3://bucket/prefix", "AZURE": "az://container/prefix", "GOOGLE": "gs://bucket/prefix"}
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(name)
    assert all("is not asked" in (named_wrong(store) or "") for store in of.values())
    monkeypatch.setenv(variable, "something")
    assert [cloud for cloud, store in of.items() if named_wrong(store) is None] == [variable.partition("_")[0]]


@pytest.mark.usefixtures("credentials")
@pytest.mark.parametrize(
    "store",
    [
        "http://evil.example/bucket",
        "s3://evil.example:8080/prefix",
        "s3://user:secret@bucket/prefix",
        "s3://bucket/prefix?endpoint=http://evil.example",
        "s3://bucket#evil",
        "s3://[::1]/prefix",
        "s3://bucket/../other",
        "s3:///prefix",
        "file:///etc",
        "s3://bucket/a b",
        "s3://" + "x" * 200,
    ],
)
def test_a_hub_that_names_a_store_by_anything_but_a_bucket_is_not_obeyed(store: str) -> None:
    why = named_wrong(store)
    assert why is not None
    assert "secret" not in why
    assert "evil" not in why


class _Store(FakeSource):
    """A store of versions' files, without their manifests."""

    async def manifest(self, version: str) -> bytes:
        raise AssertionError(f"the manifest of {version} comes from the hub")


def stored(stage: Stage) -> tuple[_Store, StoreSources]:
    store = _Store(stage.hub, name=STORE)
    return store, StoreSources(stage.sources, STORE, store)


async def pull(stage: Stage, sources: StoreSources) -> None:
    digest = parse_manifest(await stage.upstream.manifest(V1)).digest
    await stage.puller.pull(V1, digest, sources)


async def test_a_version_comes_from_the_store_and_its_manifest_and_digests_from_the_hub(stage: Stage) -> None:
    with_right_digests(stage.hub, 1)
    store, sources = stored(stage)
    await pull(stage, sources)
    assert same(stage)
    assert store.parts
    assert not stage.upstream.parts


Breaks = Callable[[FilePart, bytes], bytes]


def lies(part: FilePart, data: bytes) -> bytes:
    return bytes(len(data)) if part.start == 64 else data


def breaks_off(part: FilePart, data: bytes) -> bytes:
    if part.file.startswith("model-00002"):
        raise UnreachableError(f"{STORE} could not be reached")
    return data


@pytest.mark.parametrize(("breaks", "error", "stays"), [(lies, DamagedError, False), (breaks_off, StoreError, True)])
async def test_a_store_that_lies_or_breaks_off_gives_no_version_and_the_hub_gives_what_is_left(
    breaks: Breaks, error: type[Exception], stays: bool, stage: Stage
) -> None:
    with_right_digests(stage.hub, 1)
    store, sources = stored(stage)

    async def on_part(part: FilePart, data: bytes) -> bytes:
        return breaks(part, data)

    store.on_part = on_part
    with pytest.raises(error, match=STORE):
        await pull(stage, sources)
    assert not list((stage.root / "run").glob("v*"))
    took = await stage.pull()
    assert same(stage)
    assert bool(took.resumed) is stays
