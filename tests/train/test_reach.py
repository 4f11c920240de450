"""Nodes that do not reach each other at the ports that the system chooses."""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore

from tightfit.runs.processes import this_host
from tightfit.train import reach
from tightfit.train.place import Place
from tightfit.train.reach import check_reach
from tightfit.types import ConfigError


def place(rank: int, local_rank: int = 0, world: int = 2) -> Place:
    return Place(rank=rank, local_rank=local_rank, world=world, device=torch.device("cpu"), launcher="torchrun")


def test_nodes_that_reach_each_other() -> None:
    store, environment = HashStore(), {"GLOO_SOCKET_IFNAME": "lo"}
    threads = [threading.Thread(target=check_reach, args=(store, place(rank), environment)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)


def test_a_plan_for_two_nodes_that_runs_on_one() -> None:
    store = HashStore()
    check_reach(store, place(1, local_rank=1), {})
    check_reach(store, place(0), {})
    assert not store.check(["door-0"])  # there is no other node that would knock


def test_ranks_that_never_come_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "GROUP_TIMEOUT", timedelta(seconds=0.1))
    with pytest.raises(ConfigError, match="1 of 2 ranks have come within 0 minutes: look at what the others"):
        check_reach(HashStore(), place(0), {})


def test_a_node_that_is_not_reached_is_named() -> None:
    store = HashStore()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # nobody listens there any more

    def arrive() -> None:
        while not store.add("arrived", 0):  # such a store does not wake whoever waits when it counts
            time.sleep(0.01)
        number = store.add("nodes", 1) - 1
        store.set(f"door-{number}", f"beta 127.0.0.1 {port}")
        store.add("arrived", 1)

    thread = threading.Thread(target=arrive)
    thread.start()
    said = rf"rank 0 on {this_host()} does not reach beta at 127\.0\.0\.1, port {port} \(connection refused\)"
    with pytest.raises(ConfigError, match=said):
        check_reach(store, place(0), {"GLOO_SOCKET_IFNAME": "lo"})
    thread.join()
