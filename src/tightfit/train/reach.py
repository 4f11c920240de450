"""Whether nodes reach each other at ports that the system chooses, as gloo and NCCL need it.

A firewall that lets through the one port at which ranks meet and eats all others leaves gloo waiting for its half hour.
So before anything is prepared one rank of each node opens such a port and tries that of the next node. What keeps a
machine from being reached is nearly always its own firewall, or a name that it resolves to its own loopback; for that
one try for each node is enough.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from typing import Any

from tightfit.messages import Message, say_why
from tightfit.runs.processes import this_host
from tightfit.runs.wire import TRY_S, find_address
from tightfit.train.place import GROUP_TIMEOUT, Place
from tightfit.types import ConfigError

LOOK_S = 0.05
INTERFACE = "GLOO_SOCKET_IFNAME"


def check_reach(store: Any, place: Place, environment: Mapping[str, str]) -> None:
    """Called by all ranks at their start. How many nodes there are is counted: a plan for two may run on one."""
    number = int(store.add("nodes", place.local_rank == 0)) - 1
    store.add("arrived", 1)
    if place.local_rank > 0:
        return
    deadline = time.monotonic() + GROUP_TIMEOUT.total_seconds()
    while (arrived := store.add("arrived", 0)) < place.world:
        if time.monotonic() > deadline:
            minutes = round(GROUP_TIMEOUT.total_seconds() / 60)
            raise ConfigError(Message("train.ranks-not-here", here=arrived, world=place.world, minutes=minutes))
        time.sleep(LOOK_S)
    nodes, rank, address = int(store.add("nodes", 0)), place.rank, _own_address(environment)
    if nodes == 1:
        return
    with socket.create_server((address, 0), family=_family(address)) as door:
        store.set(f"door-{number}", f"{this_host()} {address} {door.getsockname()[1]}")
        following = (number + 1) % nodes
        store.wait([f"door-{following}"], GROUP_TIMEOUT)
        host, there, port = store.get(f"door-{following}").decode().split()
        why = ""
        try:
            socket.create_connection((there, int(port)), timeout=TRY_S).close()
        except TimeoutError:
            why = "timed out"
        except OSError as error:
            why = say_why(error)
        store.set(f"tried-{number}", "done")
        if why:
            said = {"rank": rank, "here": this_host(), "host": host, "address": there, "port": port, "why": why}
            raise ConfigError(Message("train.node-not-reached", variable=INTERFACE, **said))
        store.wait([f"tried-{(number - 1) % nodes}"], GROUP_TIMEOUT)


def _own_address(environment: Mapping[str, str]) -> str:
    """Where gloo listens: at the interface that was named, else at what the machine's own name means."""
    named = environment.get(INTERFACE, "").split(",")[0]
    if named and (found := find_address(named)) is not None:
        return found
    try:
        places = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return "127.0.0.1"
    for *_, place in places:
        with socket.socket(_family(str(place[0])), socket.SOCK_STREAM) as tried:
            try:
                tried.bind((place[0], 0))
            except OSError:
                continue
            return str(place[0])
    return "127.0.0.1"


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
