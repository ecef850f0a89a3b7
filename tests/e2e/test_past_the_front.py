"""A trainer and its rollouts at one address: Envoy or nginx, before a front and the engines of its run."""

import shutil
import socket
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from starlette.routing import Route

from refitd_front.front import PASSED
from support.attackers import other_spellings
from support.front import FrontServer
from support.front_app import front_of
from support.jobs import PATIENCE, PROMPT, RUN, TOKEN, Job, running, served_by
from support.load_balancers import NO_ENVOY, NO_NGINX, EnvoyServer, LoadBalancer, NginxServer, envoy, nginx
from support.scripted_server import Seen, answer, serve
from support.servers import API_KEY, EmbeddedServer

METHODS = ("GET", "POST", "PUT", "DELETE")
pytestmark = [pytest.mark.e2e, pytest.mark.thorough, pytest.mark.timeout(300)]
Begin = Callable[[Path, Sequence[int], int, int], LoadBalancer]
"""Makes one, of a folder and the ports of engines, service and front."""


def _envoy(folder: Path, engines: Sequence[int], refitd: int, front: int) -> LoadBalancer:
    return EnvoyServer(folder, engines, refitd, RUN, TOKEN, front)


def _nginx(folder: Path, engines: Sequence[int], _: int, front: int) -> LoadBalancer:
    return NginxServer(folder, engines, front)


both = pytest.mark.parametrize(
    "begin",
    [
        pytest.param(_envoy, id="envoy", marks=pytest.mark.skipif(envoy() is None, reason=NO_ENVOY)),
        pytest.param(_nginx, id="nginx", marks=pytest.mark.skipif(nginx() is None, reason=NO_NGINX)),
    ],
)


@dataclass
class Stage:
    job: Job
    engines: tuple[EmbeddedServer, EmbeddedServer]
    front: FrontServer
    balancer: LoadBalancer

    def post(self, path: str, body: object) -> httpx.Response:
        headers = {"Authorization": f"Bearer {API_KEY}"}
        return httpx.post(self.balancer.url + path, json=body, headers=headers, timeout=PATIENCE, trust_env=False)

    @property
    def labels(self) -> set[str]:
        """What the engines serve."""
        return {served_by(engine).label for engine in self.engines}

    def until(self, label: str) -> None:
        """Wait until an answer has this label: Envoy asks for the gates once a second."""
        ends = time.monotonic() + PATIENCE
        while (found := self.balancer.generate()) != label:
            assert time.monotonic() < ends, f"it answers {found}, not {label}\n{self.balancer.tail()}"
            time.sleep(0.05)


@contextmanager
def staged(begin: Begin, models: Path, folder: Path) -> Generator[Stage]:
    (folder / "second").mkdir()
    with (
        EmbeddedServer(folder, models / "model_a") as one,
        EmbeddedServer(folder / "second", models / "model_a") as two,
        running(folder, one, "--engine", two.url) as job,
        FrontServer(folder, job) as front,
        begin(folder, (one.port, two.port), job.refitd.port, front.port) as balancer,
    ):
        yield Stage(job, (one, two), front, balancer)


@both
def test_updates_of_a_trainer_become_versions_and_answers_go_past_the_front(
    begin: Begin, models: Path, tmp_path: Path
) -> None:
    """The front is killed at the end: what is answered then does not go through it."""
    with staged(begin, models, tmp_path) as stage:
        assert stage.balancer.generate() == "default"  # the start-up weights
        first, second = (tmp_path / f"fileroot/weight_update_v{step}" for step in (1, 2))
        shutil.copytree(models / "model_b", first)
        assert stage.post("/pause_generation", {}).status_code == 200
        sglangs = stage.post("/update_weights_from_disk", {"model_path": str(first)})
        assert (sglangs.status_code, sglangs.json()["success"]) == (200, True), sglangs.text
        assert stage.post("/continue_generation", {}).status_code == 200
        assert stage.labels == {"1"}

        shutil.copytree(models / "model_a", second)
        for path, body in {
            "/init_weight_transfer_engine": {"init_info": {}},
            "/start_weight_update": {},
            "/update_weights": {"update_info": {"path": str(second)}},
            "/finish_weight_update": {"weight_version": "2"},
        }.items():
            assert (vllms := stage.post(path, body)).status_code == 200, vllms.text
        assert stage.labels == {"2"}
        assert [version.step for version in stage.job.client.versions().items] == [2, 1]

        stage.until("2")
        stage.front.kill()
        stage.until("2")
        told = stage.post("/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 8}, "stream": True})
        assert told.text.rstrip().endswith("data: [DONE]")
        assert told.text.count("data: {") > 1
        assert stage.post("/update_weights_from_disk", {"model_path": str(first)}).status_code in {502, 503}
        assert stage.labels == {"2"}


@pytest.mark.skipif(envoy() is None, reason=NO_ENVOY)
def test_a_trainers_pause_holds_what_the_front_gets_while_no_gate_is_open_and_nothing_that_goes_past_it(
    models: Path, tmp_path: Path
) -> None:
    with staged(_envoy, models, tmp_path) as stage, ThreadPoolExecutor(32) as threads:
        assert stage.post("/pause_generation", {}).status_code == 200
        held = threads.submit(stage.balancer.generate)
        folder = tmp_path / "fileroot/weight_update_v1"
        shutil.copytree(models / "model_b", folder)
        assert stage.post("/update_weights_from_disk", {"model_path": str(folder)}).status_code == 200
        asked = [held]  # Envoy asks for the gates once a second, and has the front hold what comes until then
        while not (past := wait(asked, 0.2, FIRST_COMPLETED).done):
            asked.append(threads.submit(stage.balancer.generate))
        assert {each.result() for each in past} == {"1"}
        assert not held.done()
        assert stage.post("/continue_generation", {}).status_code == 200
        assert {each.result(PATIENCE) for each in asked} == {"1"}


@dataclass
class Arrivals:
    """What reached the engines and the front, which answer anything by 200."""

    port: int
    engines: tuple[list[Seen], list[Seen]]
    front: list[Seen]

    def ask(self, method: str, target: str) -> None:
        """Send bytes that no HTTP library would send, and read until the connection is closed."""
        line = f"{method} {target} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        with socket.create_connection(("127.0.0.1", self.port), PATIENCE) as connection:
            connection.sendall(line.encode())
            while connection.recv(65536):
                pass

    @property
    def at_engines(self) -> list[tuple[str, str]]:
        return [(seen.method, seen.path) for engine in self.engines for seen in engine]


@contextmanager
def arriving(begin: Begin, folder: Path) -> Generator[Arrivals]:
    with ExitStack() as stack:
        one, two, refitd, front = (stack.enter_context(serve(answer(200, {}))) for _ in range(4))
        ports = [int(each.url.rpartition(":")[2]) for each in (one, two, refitd, front)]
        balancer = stack.enter_context(begin(folder, ports[:2], *ports[2:]))
        yield Arrivals(balancer.port, (one.seen, two.seen), front.seen)


@both
def test_each_route_goes_where_the_front_itself_would_have_it_answered(begin: Begin, tmp_path: Path) -> None:
    front, versions, _ = front_of("http://127.0.0.1:9", tmp_path)
    paths = [each.path for each in front.app().routes if isinstance(each, Route)]
    versions.close()
    with arriving(begin, tmp_path) as arrivals:
        for path in paths:
            for method in METHODS:
                arrivals.ask(method, f"{path}?x=/../y")
        expected = [(method, f"{path}?x=/../y") for path, method in PASSED.items()]
        assert sorted(arrivals.at_engines) == sorted(expected)
        assert len(arrivals.front) == len(paths) * len(METHODS) - len(expected)


@both
def test_no_spelling_of_a_route_for_weights_reaches_an_engine(begin: Begin, tmp_path: Path) -> None:
    with arriving(begin, tmp_path) as arrivals:
        arrivals.ask("POST", "/generate")
        assert arrivals.at_engines == [("POST", "/generate")]
        for route in ("update_weights_from_disk", "update_weights", "sleep", "v1/load_lora_adapter"):
            for target in (f"/{route}", f"/{route.upper()}", *other_spellings(route)):
                arrivals.ask("POST", target)
        for target in (
            "/GENERATE",
            "/%67enerate",
            "/x/../generate",
            "//generate",
            "/generate/",
            "/generate;x",
            "/%",
            "*",
        ):
            arrivals.ask("POST", target)
        assert arrivals.at_engines == [("POST", "/generate")]
        assert "/update_weights" in {seen.path for seen in arrivals.front}
