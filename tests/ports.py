"""A port for ranks to meet at, which stays theirs.

Rank 0 listens some seconds after a test has asked for a port, and on a busy machine another process may have been given
the same one by then. While a socket is bound to it the system gives it to nobody who asks for any; whoever names it can
still listen there.
"""

from __future__ import annotations

import socket
from collections import deque

HELD: deque[socket.socket] = deque()
AT_MOST = 16  # those of the last runs


def reserve_port() -> str:
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    HELD.append(held)
    if len(HELD) > AT_MOST:
        HELD.popleft().close()
    return str(held.getsockname()[1])
