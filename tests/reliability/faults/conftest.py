"""What the tests of real faults share: tiny models, one engine for all of them, and what each model answers."""

from collections.abc import Generator

import pytest

from crash.tiny_models import make
from faults.stand import Subject
from support.servers import EmbeddedServer

MODELS = 4


@pytest.fixture(scope="session")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Generator[Subject]:
    """One engine with the defects of a real one, because it takes seconds to start."""
    folder = tmp_path_factory.mktemp("subject")
    models = make(folder, MODELS)
    with EmbeddedServer(folder, models[0], "--defects") as server:
        yield Subject.of(server, models)


@pytest.fixture
def engine(subject: Subject) -> Subject:
    """The engine as if it had just started, whatever the test before did to it."""
    subject.begin_anew()
    return subject
