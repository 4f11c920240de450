"""The port on which the ranks of a run meet."""

from __future__ import annotations

import errno
import socket
from collections.abc import Collection

from tightfit.messages import Message
from tightfit.types import ConfigError

_TRIES = 64


def free_port(taken: Collection[int] = ()) -> int:
    """A port that nobody listens on, and that no run which is just starting was given (`taken`)."""
    for _ in range(_TRIES):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("", 0))
            port: int = probe.getsockname()[1]
        if port not in taken:
            return port
    raise ConfigError(Message("runs.no-port"))


def check_port(port: int) -> None:
    """A port that was named must be free on every address, as the ranks' store binds it."""
    families = [(socket.AF_INET, "")] + ([(socket.AF_INET6, "::")] if socket.has_ipv6 else [])
    for family, address in families:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was just left may be taken
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
        except PermissionError:
            raise ConfigError(Message("runs.systems-port", port=port)) from None
        except OSError as error:
            if error.errno in _IN_USE:
                raise ConfigError(Message("runs.port-in-use", port=port)) from None


_IN_USE = (errno.EADDRINUSE,)
"""Other errors mean that there is no such family of addresses here."""
