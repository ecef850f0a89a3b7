"""Another refitd among the kinds of engines."""

from refitd.engine.kind import HOST_KIND, EngineKind, EngineServer
from refitd.engine.port import EnginePort
from refitd.engine.refitd.adapter import RefitdEngine


def _connect(server: EngineServer) -> EnginePort:
    return RefitdEngine(
        server.url,
        api_key=server.api_key,
        admin_key=server.admin_key,
        guard=server.guard,
        root=server.root,
        load_timeout=server.access.load_timeout,
        leads=server.leads,
    )


REFITD = EngineKind(
    name=HOST_KIND,
    pause_modes=(),
    programs=r"(?!)",  # no process of a host reads this root
    inside="start the service on the host with --follow and the URL of this one",
    connect=_connect,
)
