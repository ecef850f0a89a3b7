"""`python -m refitd_plugin.prefetch FD`: the prefetch worker, which a rank starts with its end of a socket."""

import socket
import sys

from refitd_plugin.prefetch.process import PrefetchProcess

if __name__ == "__main__":
    PrefetchProcess(socket.socket(fileno=int(sys.argv[1]))).serve()
