"""The map of sequence × micro batch says what the planner says of each cell alone."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from urllib.parse import parse_qsl

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from visits import client

from tightfit.web.plan_answer import answer_to, read_address
from tightfit.web.plan_drawing import Cell, heat_of

pytestmark = pytest.mark.thorough

QUERIES = ["model=1b_mamba&gpus=2&card=16GB&host-ram=32GB&seq=1000", "model=qwen2.5-7b&gpus=1&card=12GB&method=qlora"]


@cache
def cells(query: str) -> dict[tuple[int, int], Cell]:
    heat = heat_of(answer_to(read_address(parse_qsl(query)), advice=False), others=True)
    assert heat is not None
    return {(cell.sequence, cell.micro_batch): cell for _, row in heat.rows for cell in row}


@pytest.mark.parametrize("query", QUERIES)
def test_the_cell_of_the_chosen_way_needs_what_it_needs(query: str) -> None:
    way = answer_to(read_address(parse_qsl(query)), advice=False).ways[0]
    here = cells(query)[way.levers.sequence, way.levers.micro_batch]
    assert here.is_chosen
    assert here.fits is way.fits
    assert here.share == way.footprint.gpu.required_bytes / way.hardware.gpu.memory_bytes


@pytest.mark.parametrize("query", QUERIES)
def test_what_fits_is_a_staircase(query: str) -> None:
    found = cells(query)
    for (length, size), cell in found.items():
        for (longer, larger), other in found.items():
            if longer >= length and larger >= size and (other.fits or other.fits_otherwise):
                assert cell.fits or cell.fits_otherwise


@pytest.mark.parametrize("query", QUERIES)
def test_another_way_fits_where_a_plan_finds_one(query: str) -> None:
    """A cell's own address, asked as a question of its own."""
    found = cells(query)
    for place in list(found)[::8]:
        cell = found[place]
        answer = answer_to(read_address(parse_qsl(cell.address)), advice=False)
        assert answer.plan.fits is bool(cell.fits or cell.fits_otherwise), (place, cell)


def test_each_cell_is_a_link_with_its_numbers(tmp_path: Path) -> None:
    text = client(tmp_path).get(f"/plan/heat?{QUERIES[0]}&effective-batch=12&lang=en").text
    links = re.findall(r'href="/plan\?([^"]+)" aria-label="([^"]+)"', text)
    assert len(links) % 9 == 0
    assert len(links) >= 7 * 9
    for link, label in links:
        asked = read_address(parse_qsl(link.replace("&amp;", "&")))
        assert label.startswith(f"{asked.get('seq')} tokens, micro batch {asked.get('micro_batch')}: ")
        assert int(asked.get("effective_batch")) % (2 * int(asked.get("micro_batch"))) == 0


def test_the_map_says_whether_the_gpu_or_the_ram_is_short(tmp_path: Path) -> None:
    short = "model=1b_mamba&gpus=1&card=24GB&host-ram=8GB&engine=zero2&offload-optimizer=cpu&lang=en"
    found = client(tmp_path).get(f"/plan/heat?{short}").text
    short_of_ram = re.findall(r'<td class="[^"]*\bover-ram\b[^"]*"><a [^>]*aria-label="([^"]+)"[^>]*>▣ ', found)
    short_of_both = re.findall(r'<td class="[^"]*\bover\b[^"]*"><a [^>]*aria-label="([^"]+)"[^>]*>✗ ', found)
    assert short_of_ram
    assert short_of_both
    assert all(said.endswith("too little RAM or disk") for said in short_of_ram)
    assert all(said.endswith("too much for the GPU") for said in short_of_both)
