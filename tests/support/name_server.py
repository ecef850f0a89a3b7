"""A real DNS server on loopback that answers from a table, which may change under it."""

import socketserver
import threading
from collections.abc import Generator
from contextlib import contextmanager

import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

Table = dict[tuple[str, str], list[str]]
"""Records by name and kind: `("rollout.test.", "A"): ["127.0.0.1"]`. A name that is in none does not exist."""


@contextmanager
def naming(table: Table) -> Generator[tuple[str, int]]:
    """Serve a table over UDP; yields address and port."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            data, answers = self.request
            answers.sendto(reply_to(data, dict(table)), self.client_address)

    with socketserver.ThreadingUDPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield str(server.server_address[0]), int(server.server_address[1])
        finally:
            server.shutdown()
            thread.join()


def reply_to(data: bytes, table: Table) -> bytes:
    """What a name server says to a question."""
    query = dns.message.from_wire(data)
    (question,) = query.question
    reply = dns.message.make_response(query)
    name, kind = str(question.name), dns.rdatatype.to_text(question.rdtype)
    if records := table.get((name, kind)):
        reply.answer.append(dns.rrset.from_text(name, 1, "IN", kind, *records))
    elif not any(known == name for known, _ in table):
        reply.set_rcode(dns.rcode.NXDOMAIN)
    return reply.to_wire()
