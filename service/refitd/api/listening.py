"""The address that the API listens on, taken before anything else happens: a service without one touches nothing."""

import errno
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from socket import AF_INET6, AI_PASSIVE, IPPROTO_IPV6, IPV6_V6ONLY, SO_REUSEADDR, SOCK_STREAM, SOL_SOCKET, getaddrinfo
from socket import socket as Socket  # noqa: N812 - it is a class

from refitd.root.ownership import StartRefusedError

# Of a name's addresses, such as ::1 of localhost, a machine need not have all.
_ABSENT = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})


@contextmanager
def listening(host: str, port: int) -> Generator[list[Socket]]:
    """Have the address as long as the context lasts. Nobody can connect before a server takes the sockets over.

    Raises:
        StartRefusedError: it cannot be had.
    """
    with ExitStack() as opened:
        try:
            sockets = _sockets(host, port, opened)
        except OSError as error:
            raise StartRefusedError(_why_not(error, host, port)) from error
        yield sockets


def _sockets(host: str, port: int, opened: ExitStack) -> list[Socket]:
    sockets: list[Socket] = []
    absent: OSError | None = None
    for family, kind, protocol, _, address in getaddrinfo(host, port, type=SOCK_STREAM, flags=AI_PASSIVE):
        try:
            listener = opened.enter_context(Socket(family, kind, protocol))
            listener.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
            if family == AF_INET6:
                listener.setsockopt(IPPROTO_IPV6, IPV6_V6ONLY, 1)
            listener.bind(address)
            sockets.append(listener)
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            absent = error
    if not sockets and absent is not None:
        raise absent
    return sockets


def _why_not(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is taken: choose another with --port"
    return f"port {port} on {host} cannot be had ({error.strerror}): choose others with --host and --port"
