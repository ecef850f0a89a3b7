"""Whose sockets are listened to. Pure: who made the folder, and who is at the other end, in; a reason or None out.

The folder is for refitd and its engines: `.refitd/engines`, mode 0770. A process that says it is an engine is believed
where the kernel says that it runs as the service's own user, as root, as the folder's owner, or as a member of the
folder's group. A socket that another user could have put there is not even spoken to.
"""

import stat
from collections.abc import Collection
from dataclasses import dataclass

_ROOT = 0


@dataclass(frozen=True, slots=True)
class FolderAccess:
    """Who may make sockets in the folder: its owner, its group, its mode."""

    uid: int
    gid: int
    mode: int


@dataclass(frozen=True, slots=True)
class Peer:
    """The process that listens (SO_PEERCRED, SO_PEERGROUPS in unix(7))."""

    uid: int
    gids: Collection[int]


def open_to_all(access: FolderAccess) -> bool:
    """Whether everyone may make sockets in the folder."""
    return bool(access.mode & stat.S_IWOTH)


def distrust(peer: Peer, access: FolderAccess, own: int) -> str | None:
    """Why the process is not believed, in a sentence without a subject; None where it is. `own` is the service's user.

    A container with users of its own shows as user 65534: give service and engines one user namespace.
    """
    if peer.uid in {_ROOT, own, access.uid}:
        return None
    if access.mode & stat.S_IWGRP and access.gid in peer.gids:
        return None
    return f"belongs to user {peer.uid}, who is not of the group {access.gid} of the folder"
