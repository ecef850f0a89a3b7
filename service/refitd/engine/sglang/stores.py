"""Stores in which a server keeps prefixes beyond its GPU: HiCache (host memory, and a storage backend) and LMCache.

Their keys name tokens and not weights, so what the old weights computed would be read under the new ones. The flush of
an update empties the GPU's cache and HiCache's host memory; a storage backend and LMCache are cleared by a call of
their own. It is sent twice: before the pause, where a failure leaves everything as it was, and after the load, when
nothing writes any more.

SGLang (0.5.23 too) answers 200 as soon as HiCache is on, and ignores what the storage backend says. Backends that do
nothing when they are cleared are therefore refused by name.

    0.5.7    POST /clear_hicache_storage_backend, until 0.5.19
    0.5.9    POST /hicache/storage-backend/clear
    0.5.21   the call clears LMCache as well; before, it is answered with 400
"""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from refitd.engine.http import NoReply, Reply, Transport
from refitd.engine.port import Obstacle

CLEAR_SECONDS = 120.0  # the file backend deletes one file for each page
ROUTE, OLD_ROUTE = "/hicache/storage-backend/clear", "/clear_hicache_storage_backend"
_NEVER_CLEARED = frozenset({"aibrix", "eic", "simm"})


class _Flags(msgspec.Struct, frozen=True):
    """The part of /server_info that is about caches."""

    enable_hierarchical_cache: bool | None = None
    enable_lmcache: bool | None = None
    disaggregation_decode_enable_offload_kvcache: bool | None = None
    enable_unified_cache_external_linker: bool | None = None
    hicache_storage_backend: str | None = None
    radix_cache_backend: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixStores:
    """Where a server keeps prefixes beyond its GPU.

    `cleared`: it has stores that the call clears. A storage backend can be attached while the server runs, so this is
    also true of HiCache without one. `backend` is the one that it was started with. `unclearable` names a store that no
    call clears, None where there is none.
    """

    cleared: bool = False
    backend: str | None = None
    unclearable: str | None = None

    def obstacles(self) -> Iterator[Obstacle]:
        """What is in the way of updates, or may make their answers wrong."""
        if self.unclearable is not None:
            text = f"it keeps prefixes in {self.unclearable}, which SGLang does not clear"
            yield Obstacle(text=text, fix="start it without this store, or with another storage backend of HiCache")
        elif self.backend is not None:
            text = f"it keeps prefixes in HiCache's storage backend '{self.backend}', which is cleared in each update"
            fix = "give each engine a store of its own: one on older weights writes prefixes that the others would read"
            yield Obstacle(text=text, fix=fix, blocks=False)


def read_stores(server_info: Reply) -> PrefixStores:
    """What a server says of its stores; none where it says it in another form."""
    try:
        flags = server_info.read_as(_Flags)
    except msgspec.ValidationError:
        return PrefixStores(unclearable="a cache of a kind that refitd does not know")
    hicache, backend = bool(flags.enable_hierarchical_cache), flags.hicache_storage_backend
    unclearable = None
    if flags.enable_unified_cache_external_linker:
        unclearable = "an external store (--enable-unified-cache-external-linker)"
    elif flags.radix_cache_backend == "flexkv":
        unclearable = "FlexKV (--radix-cache-backend flexkv)"
    elif backend in _NEVER_CLEARED:
        unclearable = f"HiCache's storage backend '{backend}'"
    elif flags.disaggregation_decode_enable_offload_kvcache and not hicache:
        unclearable = "a storage backend (--disaggregation-decode-enable-offload-kvcache)"
    return PrefixStores(
        cleared=hicache or bool(flags.enable_lmcache), backend=backend if hicache else None, unclearable=unclearable
    )


async def clear(http: Transport, stores: PrefixStores) -> NoReply | str | None:
    """Clear a server's stores; why that did not go well, None where it did or there are none."""
    for each in stores.obstacles():
        if each.blocks:
            return f"{each.text}; {each.fix}"
    if not stores.cleared:
        return None
    reply = await http.post(ROUTE, {}, CLEAR_SECONDS)
    if isinstance(reply, Reply) and reply.has_no_route:
        reply = await http.post(OLD_ROUTE, {}, CLEAR_SECONDS)
    if isinstance(reply, NoReply):
        return reply
    if reply.ok and "cleared" in reply.text:  # which a proxy's page with a 200 does not say
        return None
    return f"its prefixes beyond the GPU (HiCache, LMCache) were not cleared: {ROUTE} was answered {reply.status}"
