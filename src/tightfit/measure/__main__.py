"""The entry of a rank: `python -m tightfit.measure`, one process for each GPU of this node.

    python -m tightfit.measure [--quick] [--parts products,memory] [--found FILE] [--folder DIR]

Parts are measured in their order, and each leaves one line of JSON when it is done: `{"part", "rates", "raw"}`, or
`{"part", "missing"}` with the reason. The first line says what is measured on. Who has started several ranks says so in
torchrun's variables, of this node alone; across nodes they meet where `--network` says.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from tightfit.hardware.measured import PARTS
from tightfit.inputs.surroundings import choose_language
from tightfit.messages import as_json

FAULTS = "TIGHTFIT_FAULTS"  # the tests' own variable: see `tests/injected_faults.py`


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tightfit.measure", description=__doc__, add_help=False)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--found", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--network", default="")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--wanted", type=int, default=0)  # GPUs that there should be
    parser.add_argument("--node", type=int, default=0)
    asked = parser.parse_args(argv)
    choose_language()
    from tightfit.runs.processes import PARENT_FD, end_with_parent

    if PARENT_FD in os.environ:  # end when whoever started this rank is gone
        end_with_parent(int(os.environ.pop(PARENT_FD)))
    warnings.simplefilter("ignore")  # torch has some for every kernel that it does not take
    # this rank, and how many there are, of this node
    _measure(asked, (int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))))
    sys.stdout.flush()
    os._exit(0)  # a process group that is not taken apart may hang or abort on the way out


def _measure(asked: argparse.Namespace, place: tuple[int, int]) -> None:
    import torch

    from tightfit.measure import card, host, links
    from tightfit.measure.bench import Bench, Found

    rank, world = place
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    on_gpu = count > 0
    device = torch.device("cuda", rank % count) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    bench = Bench(device=device, rank=rank, world=world, quick=asked.quick)

    def tell(**line: Any) -> None:
        words = json.dumps(line, allow_nan=False) + "\n"
        if asked.found is None:
            sys.stdout.write(words)
            sys.stdout.flush()
            return
        with asked.found.open("a", encoding="utf-8") as file:
            file.write(words)

    def at(part: str) -> None:
        if named := os.environ.get(FAULTS):
            import_module("injected_faults").read_faults(named, asked.found.parent, rank).at(part, 0)

    name = torch.cuda.get_device_name(device) if on_gpu else "CPU"
    tell(device=name, gpus=count, torch=torch.__version__, cuda=torch.version.cuda, hip=torch.version.hip)
    if asked.wanted and count < asked.wanted:
        return
    if world > 1:
        links.join(bench)
    card.find_grid(bench)
    bench.slow = bool(bench.agree(float(bench.slow)))
    parts: dict[str, Callable[[Bench], Found]] = {
        "products": card.products,
        "attention": card.attention,
        "memory": card.memory,
        "launch": card.launch,
        "host_link": host.host_link,
        "host_optimizer": host.host_optimizer,
        "host_memory": host.host_memory,
        "collectives": links.collectives,
        "nvme": partial(host.nvme, folder=asked.folder or Path.cwd()),
        "network": partial(links.network, address=asked.network, nodes=asked.nodes, node=asked.node),
    }
    wanted = asked.parts.split(",")
    for part, measure in parts.items():
        if part not in wanted or (part == "network" and not asked.network) or (part == "collectives" and world == 1):
            continue
        bench.until = time.perf_counter() + (PARTS[part].quick_s if asked.quick else PARTS[part].budget_s)
        try:
            at(part)
            found = measure(bench)
        except host.NotHere as reason:
            tell(part=part, missing=as_json(reason.said))
        except Exception as error:
            tell(part=part, missing=" ".join(str(error).split())[:300] or type(error).__name__)
        else:
            tell(part=part, rates=found.rates, raw=found.raw)
        if on_gpu:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
