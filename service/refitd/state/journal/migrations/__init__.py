"""The journal's schemas, and the way from each to the next: one module a schema, in Alembic's form.

A schema that was released is never edited: a change of `journal/schema.py` is a new `SCHEMA_VERSION` and a module
`schema_<n>.py` here, with `revision = "<n>"`, `down_revision = "<n - 1>"` and an `upgrade()` that uses `alembic.op`.
From schema 4 on a step has to run on PostgreSQL as well, where there never was an earlier one. What it needs of tables
it says itself, since those in `journal/schema.py` go on to change. `attempts` is read in the order of its rowids, so a
rebuilt table is filled in that order. All steps run in one transaction
(`journal/migrate.py`); there is no way back but the copy that was kept. `tests/unit/state/test_journal_migrations.py`
holds the end of the way against `journal/schema.py`, and tries it from a journal of each schema that was ever in use.
"""
