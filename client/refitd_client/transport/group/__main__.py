"""`python -m refitd_client.transport.group send|receive FD`: a sender or a receiver, begun with its end of a socket."""

import socket
import sys

from refitd_client.transport.group.child import serve
from refitd_client.transport.group.receiver import Receiver
from refitd_client.transport.group.sender import Sender

if __name__ == "__main__":
    process = Sender() if sys.argv[1] == "send" else Receiver()
    serve(socket.socket(fileno=int(sys.argv[2])), process.work, process.end)
