"""The table of ways, the reasons under it and the table of tiers, as people see them."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console

from tightfit.inputs.job_file import hardware_of, job_from_flags, model_of
from tightfit.planner import plan
from tightfit.planner.limits import Limit
from tightfit.planner.plan import Plan, Way
from tightfit.planner.tiers import all_tiers, tiered
from tightfit.priced import GIB
from tightfit.screen_plan import (
    draw_files,
    draw_limit,
    draw_plan,
    draw_tier,
    draw_tiers,
    draw_ways,
    lever_words,
    waiting,
)
from tightfit.types import Checkpointing, Levers

NARROW = 80


@cache
def planned(gpus: str = "2x24GB", host_ram: str | None = "64GB", **flags: object) -> Plan:
    return plan(job_from_flags({"model": "qwen1.5-0.5b", "gpus": gpus, "host_ram": host_ram, **flags}))


@cache
def hopeless() -> Plan:
    return planned("1x4GB", "4GB")


def needing(way: Way, gib: float) -> Way:
    gpu = replace(way.footprint.gpu, required_bytes=round(gib * GIB))
    return replace(way, footprint=replace(way.footprint, gpu=gpu), fits=gib * GIB <= way.gpu_limit_bytes)


def chosen_of(answer: Plan) -> Way:
    assert answer.chosen is not None
    return answer.chosen


def drawn(draw: object, *values: object, width: int = NARROW) -> list[str]:
    out = io.StringIO()
    draw(Console(file=out, width=width, highlight=False, emoji=False, markup=False), *values)  # type: ignore[operator]
    return out.getvalue().splitlines()


def body(lines: list[str]) -> list[str]:
    """The rows of the table."""
    start = next(number for number, line in enumerate(lines) if line.startswith("──")) + 1
    return [line for line in lines[start:] if "│" in line and "│ the card" not in line]


# --- the table ----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal_or_the_table_needs(width: int) -> None:
    for answer in (planned(), hopeless()):
        lines = drawn(draw_plan, answer, width=width)
        assert max(map(len, lines)) <= max(width, NARROW)
        assert not any(line.endswith(" ") for line in lines)


def test_rows_stand_in_the_order_of_their_pace_and_one_is_chosen() -> None:
    rows = body(drawn(draw_plan, planned()))
    rates = [int(re.findall(r"([\d,]+) +-?\d+ %$", row)[0].replace(",", "")) for row in rows]
    assert rates == sorted(rates, reverse=True)
    assert [row[0] for row in rows].count("→") == 1


def test_the_bar_ends_at_the_card_where_the_card_is_full() -> None:
    way = chosen_of(planned())
    card = way.hardware.gpu.memory_bytes / GIB
    full, half, twice = body(drawn(draw_ways, [("", needing(way, size)) for size in (card, card / 2, 2 * card)]))
    assert re.search(r"█│ ", full)
    assert re.search(r"█ +│ ", half)
    assert half.count("█") == pytest.approx(full.count("█") / 2, abs=1)
    assert re.search(r"█│█", twice)
    assert len({row.index("│") for row in (full, half, twice)}) == 1, "the card's mark stands in one column"
    assert twice.endswith("-100 %")
    assert "48.0" in twice


def test_what_does_not_fit_is_crossed_out() -> None:
    answer = planned()
    faster = replace(chosen_of(answer).pace, step_s=chosen_of(answer).pace.step_s / 2)
    tempting = replace(needing(chosen_of(answer), 30), pace=faster)
    rows = body(drawn(draw_plan, replace(answer, alternatives=(tempting,))))
    assert rows[0].startswith("× ")
    assert rows[1].startswith("→ ")


def test_too_much_host_ram_is_marked() -> None:
    lines = drawn(draw_plan, hopeless())
    assert any(re.search(r" \d+! ", row) for row in body(lines))
    assert "!: more than it has" in " ".join(lines)


def test_a_column_tells_the_gpus_only_where_ways_differ_in_them() -> None:
    answer = planned()
    way = chosen_of(answer)
    one = replace(way, hardware=replace(way.hardware, gpus_per_node=1))
    assert not any("GPUs" in line for line in drawn(draw_ways, [("", way)]))
    assert " GPUs " in drawn(draw_ways, [("", way), ("", one)])[0]


def test_the_longest_words_still_fit() -> None:
    way = chosen_of(planned("8xA100-80GB", effective_batch=1024))
    levers = replace(
        way.levers,
        engine="zero3",
        offload_optimizer="nvme",
        offload_param="cpu",
        checkpointing=Checkpointing(layers=None, offload=True),
        micro_batch=16,
        accumulation=128,
    )
    large = replace(needing(way, 1234.5), levers=levers, pace=replace(way.pace, tokens_per_s=1_234_567.0))
    one = replace(large, hardware=replace(way.hardware, gpus_per_node=1))
    lines = drawn(draw_ways, [("→", large), ("", one)])
    assert max(map(len, lines)) <= NARROW + 8, "a table that is too wide grows; its columns stay in line"
    assert "full+offload" in lines[2]
    assert "NVMe+CPU" in lines[2]
    assert lines[2].index("│") == lines[3].index("│")


# --- the words ----------------------------------------------------------------------------------


def test_what_changes_the_training_stands_out() -> None:
    answer = planned()
    changed = replace(answer, chosen=replace(chosen_of(answer), changes=("sequences are cut",)))
    lines = drawn(draw_plan, changed)
    assert lines[lines.index("IT CHANGES THE TRAINING:") + 1] == "  - sequences are cut."


def test_nothing_is_said_twice() -> None:
    answer = planned("2x8xA100-80GB")
    lines = [line for line in drawn(draw_plan, answer, width=400) if line.startswith("  - ")]
    assert len(lines) == len(set(lines))
    assert lines[-1] == f"  - {answer.unproven[0]}"


def test_levers_as_flags_leave_out_what_is_usual_and_what_is_the_users() -> None:
    levers = Levers(method="lora", engine="zero2", sequence=512, loss="fused", micro_batch=4)
    words = lever_words(levers)
    assert words == "--engine zero2 --micro-batch 4 --accum 1 --checkpointing full --loss fused"
    assert "--method lora --" in lever_words(levers, costly=True) + " --"
    assert "--seq 512" in lever_words(levers, costly=True)


def test_time_is_told_in_the_unit_that_people_would_use() -> None:
    for steps, word in ((10, "minutes for 10 steps"), (20_000, "hours for"), (2_000_000, "days for")):
        assert word in " ".join(drawn(draw_plan, planned(max_steps=steps)))


def test_a_limit_is_named_first() -> None:
    limit = Limit(wanted="seq", value=4096, plan=planned(), because=("It was made for less.",))
    lines = drawn(draw_limit, limit)
    assert lines[0] == "The longest sequence that fits: 4096 tokens."
    assert "  - It was made for less." in lines
    nothing = Limit(wanted="seq", value=None, plan=hopeless(), because=())
    assert drawn(draw_limit, nothing)[0].startswith("No seq fits")


def test_tiers() -> None:
    job = job_from_flags({"model": "qwen1.5-0.5b", "gpus": "1x8GB", "host_ram": "32GB"})
    shape, hardware = model_of(job), hardware_of(job)
    lines = drawn(draw_tiers, all_tiers(job, shape, hardware, frozenset()))
    assert any(re.match(r"minimal +\d+\.\d +yes +[\d,]+  sequences of 1024", line) for line in lines)
    one = drawn(draw_tier, tiered("minimal", job, shape, hardware, frozenset()))
    assert [row[:4] for row in body(one)] == ["tier", "free"]
    assert "The tier brings, where you said nothing:" in one
    needs_adapters = all_tiers(job, shape, hardware, frozenset({"method"}))
    row = next(line for line in drawn(draw_tiers, needs_adapters) if line.startswith("quantized"))
    assert re.match(r"quantized +- +- +-  --tier quantized trains adapters", row)


def test_written_files_and_a_worker_that_is_not_there(tmp_path: Path) -> None:
    folder = tmp_path / "my plan"
    folder.mkdir()
    (folder / "launch.sh").write_text("exec torchrun --module tightfit.train worker.json\n", encoding="utf-8")
    lines = " ".join(drawn(draw_files, [folder / "launch.sh"], False, width=200))
    assert f"bash '{folder}/launch.sh'" in lines
    assert "does not have yet" in lines
    assert "does not have yet" not in " ".join(drawn(draw_files, [folder / "launch.sh"], True, width=200))


def test_a_pipe_sees_no_spinner(capsys: pytest.CaptureFixture[str]) -> None:
    with waiting("pricing"):
        pass
    assert capsys.readouterr() == ("", "")
