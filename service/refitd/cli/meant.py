"""Commands that other tools have and refitd has not, and which of its own does what they mean.

A slip of the fingers is met by Typer itself, which looks for names that are spelled alike.
"""

from collections.abc import Mapping
from typing import Any

from refitd.cli.help import Group

MEANT: Mapping[str, str] = {
    **dict.fromkeys(("events", "history", "logs", "audit", "decisions"), "log"),
    **dict.fromkeys(("start", "run", "up", "server", "daemon"), "serve"),
    **dict.fromkeys(("ls", "list", "checkpoints", "models"), "versions"),
    **dict.fromkeys(("info", "health", "ps"), "status"),
    **dict.fromkeys(("workers", "replicas", "servers", "fleet"), "engines"),
    **dict.fromkeys(("watch", "monitor", "dashboard"), "top"),
    **dict.fromkeys(("why", "describe", "show", "get"), "explain"),
    **dict.fromkeys(("resync", "reload", "refresh"), "engines resync"),
    **dict.fromkeys(("revert", "undo", "restore"), "rollback"),
    **dict.fromkeys(("push", "update", "announce", "notify"), "publish"),
    **dict.fromkeys(("gc", "prune", "clean", "cleanup", "delete", "rm"), "reclaim"),
    **dict.fromkeys(("check", "diagnose", "test"), "doctor"),
    **dict.fromkeys(("repair", "verify", "scrub"), "fsck"),
    **dict.fromkeys(("unpause", "continue"), "resume"),
    **dict.fromkeys(("keep", "hold"), "pin"),
}


class Commands(Group):
    """Says which command was meant by a word that is none."""

    def resolve_command(self, ctx: Any, args: Any) -> Any:
        """The command that the first word names."""
        if args and args[0] not in self.commands and args[0] in MEANT:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {MEANT[args[0]]!r}?")
        return super().resolve_command(ctx, args)
