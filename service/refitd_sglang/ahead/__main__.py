"""`python -m refitd_sglang.ahead FD`: the clerk, which a rank starts with its end of a socket."""

import socket
import sys

from refitd_sglang.ahead.process import ClerkProcess

if __name__ == "__main__":
    ClerkProcess(socket.socket(fileno=int(sys.argv[1]))).serve()
