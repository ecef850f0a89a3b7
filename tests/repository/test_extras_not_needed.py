"""The service and the SDK need no module of an extra that is not theirs."""

import subprocess
import sys

import pytest

_OF_OTHER_EXTRAS = ("psycopg", "zstandard", "opentelemetry.sdk", "opentelemetry.exporter", "ray")
_OF_THE_SERVICE = ("fastapi", "starlette", "uvicorn", "sqlalchemy", "typer", "obstore", "pydantic")
_BLOCKED = """
import importlib, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if any(name == each or name.startswith(each + ".") for each in {missing!r}):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
for module in {modules!r}:
    importlib.import_module(module)
"""


@pytest.mark.parametrize(
    ("modules", "missing"),
    [
        (("refitd.app", "refitd.cli.app"), (*_OF_OTHER_EXTRAS, "torch")),
        (("refitd_client", "refitd_client.publisher"), (*_OF_OTHER_EXTRAS, *_OF_THE_SERVICE)),
    ],
)
def test_what_is_installed_without_further_extras_is_imported(
    modules: tuple[str, ...], missing: tuple[str, ...]
) -> None:
    """A class that routes and the PostgreSQL journal share moved next to the driver's import: every service needed the
    driver then.
    """
    script = _BLOCKED.format(missing=missing, modules=modules)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
