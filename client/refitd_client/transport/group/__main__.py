"""`python -m refitd_client.transport.group send|receive|join FD`: such a process, with its end of a socket."""

import socket
import sys

from refitd_client.transport.group.child import serve
from refitd_client.transport.group.member import MemberProcess
from refitd_client.transport.group.receiver import ReceiverProcess
from refitd_client.transport.group.sender import SenderProcess

_ROLES = {"send": SenderProcess, "receive": ReceiverProcess, "join": MemberProcess}

if __name__ == "__main__":
    process = _ROLES[sys.argv[1]]()
    serve(socket.socket(fileno=int(sys.argv[2])), process.work, process.end)
