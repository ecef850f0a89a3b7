"""deploy/locks: exact versions with hashes of what images and CI install, which fit what pyproject.toml asks for."""

import os
import re
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TREE = Path(__file__).resolve().parents[2]
LOCKS = TREE / "deploy/locks"
# Which extras a lock is for. torch is in a lock of its own: its CPU build comes from another index.
EXTRAS = {
    "service": ["service", "postgres"],
    "lowest": ["service"],
    "embedded": ["service", "embedded"],
    "dev": ["dev", "docs", "browser"],
}
TESTED = ("sglang", "areal", "vllm", "trainers")  # what the contract is tested against, with environments of their own
NAMES = (*EXTRAS, "build", "torch", *TESTED, *(f"{name}-alone" for name in TESTED))
ENVIRONMENTS = [
    {
        "python_version": python,
        "python_full_version": f"{python}.9",
        "platform_machine": machine,
        "sys_platform": "linux",
        "platform_system": "Linux",
    }
    for python, machine in product(("3.11", "3.12", "3.13", "3.14"), ("x86_64", "aarch64"))
]


@dataclass(frozen=True)
class Locked:
    requirement: Requirement
    hashes: tuple[str, ...]

    @property
    def name(self) -> str:
        return canonicalize_name(self.requirement.name)

    @property
    def version(self) -> str:
        (pin,) = self.requirement.specifier
        assert pin.operator == "=="
        return pin.version

    def holds_in(self, environment: dict[str, str]) -> bool:
        return self.requirement.marker is None or self.requirement.marker.evaluate(environment)


@cache
def lock(name: str) -> list[Locked]:
    text = re.sub(r"^#.*\n", "", (LOCKS / f"{name}.txt").read_text(), flags=re.MULTILINE)
    entries = [line.split(" --hash=") for line in re.sub(r" *\\\n *", " ", text).splitlines()]
    return [Locked(Requirement(first), tuple(hashes)) for first, *hashes in entries]


def installed(environment: dict[str, str], *names: str) -> dict[str, str]:
    """The versions that these locks give an environment."""
    found: dict[str, str] = {}
    for name in names:
        for each in lock(name):
            if each.holds_in(environment):
                assert found.setdefault(each.name, each.version) == each.version, f"{each.name} twice"
    return found


@cache
def project() -> dict[str, list[str]]:
    return {"": (said := tomllib.loads((TREE / "pyproject.toml").read_text())["project"])["dependencies"]} | said[
        "optional-dependencies"
    ]


def asked_for(extra: str) -> Iterator[Requirement]:
    for text in project()[extra]:
        requirement = Requirement(text)
        if requirement.name == "refitd":
            for other in requirement.extras:
                yield from asked_for(other)
        else:
            yield requirement


@pytest.mark.parametrize("name", NAMES)
def test_every_package_of_a_lock_has_one_version_and_hashes(name: str) -> None:
    assert lock(name)
    for each in lock(name):
        assert each.version
        assert each.hashes, f"{each.name}: run deploy/make-locks again"
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", text) for text in each.hashes), each.name
        assert each.requirement.url is None


@pytest.mark.parametrize("name", EXTRAS)
@pytest.mark.parametrize(
    "environment", ENVIRONMENTS, ids=lambda env: f"{env['python_version']}-{env['platform_machine']}"
)
def test_a_lock_has_what_pyproject_asks_for_in_a_version_that_it_takes(name: str, environment: dict[str, str]) -> None:
    versions = installed(environment, name, "torch")
    for requirement in [each for extra in ("", *EXTRAS[name]) for each in asked_for(extra)]:
        if requirement.marker is None or requirement.marker.evaluate(environment):
            version = versions.get(canonicalize_name(requirement.name))
            assert version is not None, f"{requirement.name} is not in {name}.txt: run deploy/make-locks"
            assert requirement.specifier.contains(version, prereleases=True), (
                f"{requirement}, and the lock has {version}"
            )


@pytest.mark.parametrize(
    "environment", ENVIRONMENTS, ids=lambda env: f"{env['python_version']}-{env['platform_machine']}"
)
def test_images_have_the_versions_that_ci_tests(environment: dict[str, str]) -> None:
    tested = installed(environment, "dev", "torch")
    for name in ("service", "embedded", "build"):
        assert installed(environment, name).items() <= tested.items()


def test_the_torch_of_the_lock_is_the_cpu_build_that_constraints_name() -> None:
    (torch,) = lock("torch")
    assert f"torch=={torch.version}\n" == re.sub(
        r"(?s).*^(torch==\S+)\n.*", r"\1+cpu\n", (TREE / "constraints.txt").read_text(), flags=re.MULTILINE
    )
    assert not [name for name in EXTRAS for each in lock(name) if each.name == "torch"]


@pytest.mark.parametrize("name", TESTED)
def test_what_the_contract_is_tested_against_is_locked_too(name: str) -> None:
    folder = TREE / "tests" / name
    for environment in ENVIRONMENTS:
        versions = installed(environment, name, f"{name}-alone", "torch")
        for text in re.findall(
            r"^\w.*$", (folder / "packages.in").read_text() + (folder / "alone.in").read_text(), re.MULTILINE
        ):
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate(environment):
                version = versions[canonicalize_name(requirement.name)]
                assert requirement.specifier.contains(version, prereleases=True)
    text = re.sub(r" *\\\n *", " ", (folder / "install").read_text())
    (install,) = re.findall(r"pip install .*", text)
    assert " --require-hashes --no-deps --only-binary :all: " in install
    assert re.findall(r"locks/([\w-]+)\.txt", install) == [name, f"{name}-alone"]


def test_images_install_by_hash_what_is_locked_and_nothing_else() -> None:
    """Of refitd's own wheel, which has no hash, no dependency is fetched."""
    text = re.sub(r" *\\\n *", " ", (TREE / "deploy/Dockerfile").read_text())
    installs = re.findall(r"pip (?:install|wheel) (?:(?!&&).)+", text)
    locked = [each for each in installs if "-r deploy/locks/" in each]
    assert sorted(re.findall(r"-r deploy/locks/(\w+)\.txt", "".join(locked))) == ["build", "embedded", "service"]
    assert all(re.search(r"--require-hashes --no-deps --only-binary :all: ", each) for each in locked)
    for each in installs:
        assert each in locked or re.search(r" --no-deps (--no-index /wheels|--no-build-isolation )", each), each
    assert "LOCKED=1 deploy/install-torch" in text
    assert text.count("&& pip check") == 2
    ignored = (TREE / ".dockerignore").read_text().split()
    assert "!deploy/locks" in ignored


def test_ci_installs_what_is_locked_and_others_what_they_choose() -> None:
    def commands(**variables: str) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "LOCKED"} | variables
        words = ("make", "--dry-run", "--always-make", "docs")
        done = subprocess.run(words, cwd=TREE, env=environment, capture_output=True, text=True, check=True)
        return "\n".join(line for line in done.stdout.splitlines() if " pip install " in line)

    assert re.search(r"^export LOCKED=1$", (TREE / ".ci/run").read_text(), re.MULTILINE)
    first, second = commands(LOCKED="1").splitlines()
    assert first.endswith(" --require-hashes --no-deps --only-binary :all: -r deploy/locks/dev.txt")
    assert second.endswith(" --no-deps --no-build-isolation -e .")
    assert "locks" not in commands()
    assert "-e '.[dev]'" in commands()
