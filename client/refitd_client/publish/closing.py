"""How what a publisher has is given back."""

from refitd_client.publish.attempt import PublisherContext
from refitd_client.publish.publication import PendingPublication
from refitd_client.transport.ipc import exporter


def release(begun: list[PendingPublication], context: PublisherContext) -> None:
    """Give everything back when the last publication has ended: until then it writes, and its step is not free."""

    def give_back() -> None:
        if not context.folder.lock.held:  # in a forked child: what is registered is its parent's
            return
        try:
            context.forget_deltas()
            context.mappings.close()
        finally:
            if context.bucket is not None:
                context.bucket.close()
            context.handover.close()
            exporter.end(context.folder.path)  # before the lock: the next one to export there voids what it finds
            context.folder.lock.release()

    if begun:
        begun[-1].afterwards(give_back)
    else:
        give_back()
