"""What chaos calls leaked: everything under the root that neither the plan keeps nor a publisher needs."""

from pathlib import Path

import pytest

from chaos.audit import leaked
from chaos.book import RUN, Book, Published
from refitd_client.contract.naming import Order
from refitd_client.contract.wire import Reclaimable, ReclaimPlan

SEVEN = Published(Order(1, 7), "m1")
PLAN = ReclaimPlan(
    items=[Reclaimable(path=f"{RUN}/{SEVEN.name}", keep=True, reasons=["target"], version=SEVEN.id)], freed_bytes=0
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root in good order with one version."""
    for folder in (f"{RUN}/{SEVEN.name}", ".refitd/trash"):
        (tmp_path / folder).mkdir(parents=True)
    for file in (f"{RUN}/.publisher.lock", f"{RUN}/.publisher.json", ".refitd/lock"):
        (tmp_path / file).touch()
    return tmp_path


def test_a_root_in_good_order_has_no_leak(root: Path) -> None:
    assert leaked(root, PLAN, Book({SEVEN})) == []


@pytest.mark.parametrize(
    "stray", [f"{RUN}/v000006", f"{RUN}/.incoming-1", f"{RUN}/other", ".refitd/trash/1", "exp/other", "other"]
)
def test_whatever_nobody_keeps_has_leaked(root: Path, stray: str) -> None:
    (root / stray).mkdir()
    assert leaked(root, PLAN, Book({SEVEN})) == [stray]


def test_a_version_that_the_rules_would_drop_has_leaked(root: Path) -> None:
    assert leaked(root, ReclaimPlan(items=[], freed_bytes=0), Book({SEVEN})) == [f"{RUN}/{SEVEN.name}"]


def test_a_folder_that_the_service_keeps_and_nobody_published_has_leaked(root: Path) -> None:
    assert leaked(root, PLAN, Book()) == [f"{RUN}/{SEVEN.name}"]
