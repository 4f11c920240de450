"""What the ranks reach between them: collectives by size, inside the node and across nodes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from tightfit.measure.bench import Bench, Found

KIB, MIB = 2**10, 2**20
SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 128 * MIB, 512 * MIB)
SIZES_QUICK = (4 * KIB, MIB, 128 * MIB)
SIZES_HOST = (4 * KIB, 64 * KIB, MIB, 16 * MIB)
SIZES_HOST_QUICK = (4 * KIB, MIB, 8 * MIB)
"""Bytes of the whole, which every rank has at the end of a gathering."""
LARGE_SHARE = 1 / 4  # of the largest size: what counts as large
TIMEOUT = timedelta(seconds=60)


def join(bench: Bench, store: Any = None) -> None:
    """Become a member of the node's group, which has a backend of its own for the host."""
    backend = "cpu:gloo,cuda:nccl" if bench.on_gpu else "gloo"
    dist.init_process_group(backend, rank=bench.rank, world_size=bench.world, store=store, timeout=TIMEOUT)


def collectives(bench: Bench) -> Found:
    rates, raw = _measure(bench, bench.world)
    return Found(rates={f"link{name}": rate for name, rate in rates.items()}, raw=raw)


def network(bench: Bench, address: str, nodes: int, node: int) -> Found:
    """The same over every rank of all nodes; it is the last part, for the node's own group is left for it."""
    host, _, port = address.rpartition(":")
    if dist.is_initialized():
        dist.destroy_process_group()
    rank, world = node * bench.world + bench.rank, nodes * bench.world
    store = torch._C._distributed_c10d.TCPStore(host, int(port), world, is_master=rank == 0, timeout=TIMEOUT)
    all_ranks = Bench(device=bench.device, rank=rank, world=world, quick=bench.quick, slow=bench.slow)
    all_ranks.until = bench.until
    join(all_ranks, store)
    rates, raw = _measure(all_ranks, world)
    return Found(rates={f"network{name}": rate for name, rate in rates.items()}, raw=raw)


def _measure(bench: Bench, world: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """The bus bandwidth of large gatherings, "", and the latency of a small one, "_latency_s"; and every size."""
    sizes: tuple[int, ...]
    if bench.on_gpu:
        sizes, dtype = SIZES_QUICK if bench.quick else SIZES, torch.bfloat16
    else:
        sizes, dtype = SIZES_HOST_QUICK if bench.quick else SIZES_HOST, torch.float32
    rows: list[dict[str, Any]] = []
    for size in sizes:
        if rows and bench.agree(float(bench.out_of_time)):
            break
        whole = torch.ones(max(size // dtype.itemsize // world, 1) * world, dtype=dtype, device=bench.device)
        shard = whole[: whole.numel() // world].clone()
        kinds: dict[str, tuple[float, Callable[[], object]]] = {
            "all_gather": (1.0, lambda whole=whole, shard=shard: dist.all_gather_into_tensor(whole, shard)),  # type: ignore[misc]
            "reduce_scatter": (1.0, lambda whole=whole, shard=shard: dist.reduce_scatter_tensor(shard, whole)),  # type: ignore[misc]
            "all_reduce": (2.0, lambda whole=whole: dist.all_reduce(whole)),  # type: ignore[misc]
        }
        held = whole.numel() * dtype.itemsize
        for name, (times, run) in kinds.items():
            try:
                seconds = _seconds(bench, run)
            except (RuntimeError, NotImplementedError) as error:  # gloo lacks some
                rows.append({"kind": name, "bytes": held, "problem": " ".join(str(error).split())[:120]})
                continue
            bus = times * held * (world - 1) / world / seconds
            rows.append({"kind": name, "bytes": held, "seconds": seconds, "bus": bus})
    gathered = [row for row in rows if row["kind"] == "all_gather" and "seconds" in row]
    if not gathered:
        raise RuntimeError(rows[0]["problem"])
    largest = max(row["bytes"] for row in gathered)
    large = median(row["bus"] for row in gathered if row["bytes"] >= largest * LARGE_SHARE)
    return {"": large, "_latency_s": gathered[0]["seconds"]}, rows


def _seconds(bench: Bench, run: Callable[[], object]) -> float:
    """Of one collective: each rank must ask for it as often as every other."""
    bench.meet()
    for _ in range(2):
        run()
    bench.wait()
    once = bench.agree(bench._series(run, 3, 1))
    repeats = int(min(40, max(3, (0.1 if bench.quick else 0.3) / max(once, 1e-6))))
    return bench.agree(bench._series(run, repeats, 1))
