"""`python -m refitd_client.transport.group send|receive FD`: a sender or a receiver, begun with its end of a socket."""

import socket
import sys

from refitd_client.transport.group.child import serve
from refitd_client.transport.group.receiver import ReceiverProcess
from refitd_client.transport.group.sender import SenderProcess

if __name__ == "__main__":
    process = SenderProcess() if sys.argv[1] == "send" else ReceiverProcess()
    serve(socket.socket(fileno=int(sys.argv[2])), process.work, process.end)
