"""`refitd adopt`: an emptied root becomes the root of the journal that knew it, at somebody's word."""

from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

from refitd.cli.flags import parameters, settings_from
from refitd.cli.options import Json
from refitd.cli.output import speaking
from refitd.cli.render import sentence
from refitd_client.errors import RefitError

_SETTINGS = frozenset({"root", "state"})


def adopt(**flags: Any) -> None:
    """Have a root that was emptied be the service's root again: say so when its file system is mounted, and what was in
    it is gone for good.

    A service does not believe an empty folder in the place of its root, because a file system that is not mounted looks
    like one: it answers notices with 503, and loses and deletes nothing. Versions that are not there count as LOST
    afterwards, and a trainer that is started again begins a new generation. A service that runs goes on by itself.
    A root in memory that a reboot has emptied needs no word: starting the service is enough.

    \b
    refitd adopt --root /shared/weights
    refitd adopt --root /shared/weights --state /var/lib/refitd
    """
    json = bool(flags.pop("json", False))
    with speaking(json=json) as out:
        settings = settings_from(flags)
        is_new = _adopted(settings.root.resolve(), settings.state_folder)
        told = "is the root of this journal from now on" if is_new else "is the root of this journal already"
        out.show({"root": str(settings.root), "adopted": is_new}, sentence(f"{settings.root} {told}."))


def _adopted(root: Path, state: Path) -> bool:
    # Here, because only this command needs them.
    from refitd.root.mark import RootRefusedError
    from refitd.root.mark import adopt as adopted
    from refitd.state.journal import reads
    from refitd.state.journal.condition import Sound, examine_journal, reading
    from refitd.state.journal.journal import JOURNAL_NAME

    path = state / JOURNAL_NAME
    if not isinstance(examine_journal(path, thorough=False), Sound):
        raise RefitError(f"{path} is no journal that can be read: name the service's --state; refitd fsck says more")
    with reading(path) as connection:
        origin = reads.read_origin(connection)
    if origin is None or origin.root is None:
        raise RefitError(f"{path} knows no root yet: start the service, which takes {root} as it is")
    try:
        return adopted(root, origin.root)
    except (OSError, RootRefusedError) as error:
        raise RefitError(str(error)) from error


# Typer reads a command's options from its signature.
_SHARED = [parameter for parameter in parameters() if parameter.name in _SETTINGS]
_OWN = [Parameter("json", Parameter.KEYWORD_ONLY, default=False, annotation=Json)]
adopt.__signature__ = Signature([*_SHARED, *_OWN])  # pyright: ignore[reportFunctionMemberAccess]
