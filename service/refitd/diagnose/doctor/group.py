"""The group of services on one database: whether that can hold their journal, and which of them leads."""

from collections.abc import Iterator

import psycopg

from refitd.diagnose.doctor.finding import CheckName, Finding, failed, good, warning
from refitd.settings import Settings
from refitd.state.journal.postgres import look_at_group


def judge_group(settings: Settings) -> Iterator[Finding]:
    """Ask the database. Blocks, for seconds where it does not answer."""
    database = settings.database
    if database is None:
        return
    try:
        leader, why = look_at_group(database)
    except psycopg.Error as error:
        text = f"it does not answer: {' '.join(str(error).split())}"
        yield failed(CheckName.JOURNAL, database.shown, text, "see to the database, its address and its password")
        return
    if why is not None:
        yield failed(CheckName.JOURNAL, database.shown, why, "name another database with --state")
    elif leader is None:
        yield good(CheckName.JOURNAL, database.shown, "no service has led yet: the first that starts does")
    elif leader.released:
        text = f"no service leads: {leader.address} gave the lead back (epoch {leader.epoch})"
        yield warning(CheckName.JOURNAL, database.shown, text, "start a service of the group")
    else:
        text = f"{leader.address} leads, or led last, since {leader.since} (epoch {leader.epoch})"
        yield good(CheckName.JOURNAL, database.shown, text)
