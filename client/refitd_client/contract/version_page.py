"""A list of versions, with what a publisher wants to know beside them."""

from dataclasses import dataclass, field

from refitd_client.contract.wire import Page, Version

MAX_BARRED = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPage(Page[Version]):
    """A page of versions. `root` is the name in the `.refitd/id` of the service's root, None while that is not there:
    a publisher finds by it that it writes into another folder. `folder` is that root's path on the service's host.
    `refuses` says why this service, which follows another, takes no notice of a version; None where it does. `barred`
    are, where good versions of one run are asked for, the ids of the newest ones that no engine goes to any more and
    whose files are gone, at most `MAX_BARRED`: a host that follows may have their files. `begins` is the generation
    with which the next publisher of the run that was asked for begins, where that run was deleted. `on_hosts` is the id
    of the newest version of that run which hosts have and this service does not know, as after a loss of its root: a
    publisher counts its name as used up, so that no two versions have one name.
    """

    items: list[Version]
    root: str | None = None
    folder: str | None = None
    refuses: str | None = None
    barred: list[str] = field(default_factory=list[str])
    begins: int | None = None
    on_hosts: str | None = None
