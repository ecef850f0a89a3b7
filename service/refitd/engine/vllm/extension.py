"""refitd's extension inside a vLLM server, as the server's adapter meets it.

A server that was started with `--worker-extension-cls refitd_vllm.Worker`, and in whose processes no plugin of vLLM
runs, has no channel until each of its workers was asked to open one. A worker knows neither the number by which its
server names itself, where it draws another one after the start, nor the root, where no variable says it. The service
knows both.
"""

from refitd.engine.http import CallFailure, NoReply, Transport
from refitd.engine.limits import CALL_SECONDS
from refitd.engine.load_reply import Unclear
from refitd.engine.plugin.client import PluginClient
from refitd.engine.port import Process
from refitd.engine.vllm.info import VllmServerInfo
from refitd.engine.vllm.obstacles import EXTENSION
from refitd.engine.vllm.reply import not_opened


class ExtensionChannel:
    """The channel of the extension in one server.

    Attributes:
        opens: whether it is opened where it is not open: by the service, and not by commands that look at the server.
        fault: why the extension has not opened it, as far as it was asked.
    """

    def __init__(self, http: Transport, root: str, *, opens: bool) -> None:
        """Make no call yet.

        Args:
            http: to the server.
            root: refitd's root as the server sees it.
            opens: as the attribute.
        """
        self.opens = opens
        self.fault: str | None = None
        self._http, self._root = http, root
        self._asked: Process | None = None  # the process of the server that was asked to open it

    async def find(self, plugin: PluginClient, server: VllmServerInfo) -> str | None:
        """Find the ranks, and have them open it where it is not open: once for each process of the server.

        Args:
            plugin: speaks through it.
            server: how the server was started.

        Returns:
            Why nothing counts any more that this process of the server answers; None where it does.
        """
        await plugin.look(server.launch)
        can = server.capabilities
        extended = (can.extension or "").startswith(EXTENSION) and can.replicas == 1
        if plugin.release is not None or not self.opens or not extended or server.process == self._asked:
            return None
        known = {"instance": server.process.started or "", "root": self._root}
        order = {"method": "refitd_open", "kwargs": known}
        reply = await self._http.post("/collective_rpc", order, CALL_SECONDS)
        never_sent = isinstance(reply, NoReply) and reply.lost is CallFailure.NEVER_SENT
        self._asked = None if never_sent else server.process
        fault = not_opened(reply, can.ranks)
        self.fault = fault.reason if isinstance(fault, Unclear) else fault
        await plugin.look(server.launch, anew=True)
        return self.fault if isinstance(fault, Unclear) and can.ranks > 1 else None
