"""The route that compares two versions. Values are read by one request at a time, as long as its client waits."""

import asyncio
from threading import Event

from fastapi import APIRouter, Request

from refitd.api.context import Service, ServiceOf, find_version
from refitd.catalog.compare import NotComparableError, Side, changed_elements, compared, read_values, side_of
from refitd.catalog.files import DiskFiles
from refitd.problem import ProblemError, Slug
from refitd.root.threads import LISTING_SECONDS, RootThreads
from refitd_client.contract.history import VersionsCompared

_LOOK_SECONDS = 0.2  # between looks at whether the client still waits

router = APIRouter(prefix="/v1", tags=["history"])


class Comparer:
    """Compares versions for the API, in threads of its own: the root's file system may hang."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._threads = RootThreads(most=2)
        self._files = DiskFiles(service.settings.root, threads=self._threads)
        self._reading = asyncio.Lock()

    async def compare(self, first_id: str, second_id: str) -> tuple[Side, Side, VersionsCompared]:
        """Compare by headers, fingerprints and deltas; no weights are read.

        Raises:
            NotComparableError: the versions cannot be compared.
            ProblemError: there is no such version.
        """
        versions = self._service.store.versions
        first = await side_of(await find_version(self._service, first_id), self._files, versions)
        second = await side_of(await find_version(self._service, second_id), self._files, versions)

        def look() -> VersionsCompared:
            return compared(first, second, changed_elements(self._service.settings.root, first, second))

        return first, second, await self._threads.run("comparing versions", look, within=LISTING_SECONDS)

    async def with_norms(self, first: Side, second: Side, request: Request) -> VersionsCompared:
        """Compare the values as well, as long as the client waits.

        Raises:
            NotComparableError: the versions cannot be compared so far.
            ProblemError: another comparison reads already.
        """
        if self._reading.locked():
            raise ProblemError(Slug.TOO_MANY, "another comparison of values is under way: ask again when it has ended")
        root, stop = self._service.settings.root, Event()

        def look() -> VersionsCompared:
            values = read_values(root, first, second, stop)
            return compared(first, second, changed_elements(root, first, second), values)

        async with self._reading:
            reading = asyncio.create_task(self._threads.run("comparing values", look))
            try:
                while not (await asyncio.wait({reading}, timeout=_LOOK_SECONDS))[0]:
                    if await request.is_disconnected():
                        stop.set()
                return await reading
            finally:
                stop.set()  # a cancellation does not end the thread, which would read on to the end
                reading.cancel()


@router.get("/versions/{first}/compare/{second}")
async def compare_versions(
    first: str, second: str, service: ServiceOf, request: Request, norms: bool = False
) -> VersionsCompared:
    """What differs between two versions: tensors, bytes, and by layer how many tensors and elements changed.

    That is read from headers, manifests and, where one is a delta on the other, from the delta's list. `norms` also
    reads the values of two full versions, at most 4 GiB of each, for the norm of each layer and of its change, and for
    how many elements changed.
    409 where files are gone or cannot be compared so; the detail says why.
    """
    comparer: Comparer = request.app.state.comparer
    try:
        one, other, found = await comparer.compare(first, second)
        return await comparer.with_norms(one, other, request) if norms else found
    except NotComparableError as error:
        raise ProblemError(Slug.NOT_COMPARABLE, str(error)) from error
    except OSError as error:
        raise ProblemError(Slug.NOT_COMPARABLE, f"the root cannot be read now: {error}") from error
