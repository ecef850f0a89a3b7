"""Journals of every schema that was ever in use, as the code of that day wrote them: tests/journals/*.sql."""

import sqlite3
from contextlib import closing
from pathlib import Path

from refitd.state.journal.database import JOURNAL_NAME

_FOLDER = Path(__file__).resolve().parents[1] / "journals"
OLD = tuple(sorted(file.stem for file in _FOLDER.glob("*.sql")))


def old_journal(name: str, state: Path) -> Path:
    """Put one into a state folder, in WAL mode as the service has it; its path."""
    state.mkdir(parents=True, exist_ok=True)
    path = state / JOURNAL_NAME
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        connection.executescript("BEGIN;\n" + (_FOLDER / f"{name}.sql").read_text() + "COMMIT;\n")
    return path


def schema_of(name: str) -> int:
    """The schema that one is of."""
    return int(name.split("-")[1])


def dump(path: Path) -> list[str]:
    """All that is in a journal: its schema's number, its tables, its rows."""
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
        number = connection.execute("PRAGMA user_version").fetchone()
        return [f"schema {number[0]}", *connection.iterdump()]


def shape(path: Path) -> dict[str, object]:
    """Its tables and indexes, whatever SQL made them: columns with type, null and key; indexed columns in order."""
    with closing(sqlite3.connect(path)) as connection:
        names = connection.execute("SELECT type, name FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'").fetchall()
        found: dict[str, object] = {}
        for kind, name in names:
            ask = "table_info" if kind == "table" else "index_xinfo"
            found[f"{kind} {name}"] = connection.execute(f"PRAGMA {ask}({name})").fetchall()
            if kind == "table":
                indexes = connection.execute(f"PRAGMA index_list({name})").fetchall()
                found[f"indexes of {name}"] = sorted(index[1:] for index in indexes)
        return found
