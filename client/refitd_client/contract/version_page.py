"""A list of versions, with what a publisher wants to know beside them."""

from dataclasses import dataclass

from refitd_client.contract.wire import Page, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPage(Page[Version]):
    """A page of versions. `root` is the name in the `.refitd/id` of the service's root, None while that is not there:
    a publisher finds by it that it writes into another folder. `folder` is that root's path on the service's host.
    `refuses` says why this service, which follows another, takes no notice of a version; None where it does.
    """

    items: list[Version]
    root: str | None = None
    folder: str | None = None
    refuses: str | None = None
