"""The table of ways, the reasons under it and the table of tiers, as people see them."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console

from tightfit.job.file import hardware_of, job_from_flags, model_of
from tightfit.messages import id_of
from tightfit.planner import Tiered, all_tiers, plan, plan_tier
from tightfit.planner.limits import Limit
from tightfit.planner.plan import Plan, Way
from tightfit.planner.reasons import lacking_bytes, missing, worth_showing
from tightfit.priced import GIB, strategy_name
from tightfit.screen.plan import (
    draw_files,
    draw_limit,
    draw_plan,
    draw_tier,
    draw_tiers,
    draw_ways,
    lever_flags,
    waiting,
)
from tightfit.types import Checkpointing, Lora

NARROW = 80


@cache
def planned(gpus: str = "2x24GB", host_ram: str | None = "64GB", **flags: object) -> Plan:
    return plan(job_from_flags({"model": "qwen1.5-0.5b", "gpus": gpus, "host_ram": host_ram, **flags}))


@cache
def hopeless() -> Plan:
    return planned("1x4GB", "4GB", effective_batch=1)


@cache
def tiers() -> list[Tiered]:
    job = job_from_flags({"model": "qwen1.5-0.5b", "gpus": "1x8GB", "host_ram": "32GB"})
    return all_tiers(job, model_of(job), hardware_of(job), frozenset())


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


@pytest.mark.thorough
@pytest.mark.parametrize("width", [40, 60, 72, 80, 100, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    for answer in (planned(), hopeless()):
        lines = drawn(draw_plan, answer, width=width)
        assert max(map(len, lines)) <= width
        assert not any(line.endswith(" ") for line in lines)
        assert any(re.match(r"[→×] \w", line) for line in lines), "the rows are there at any width"
    assert max(map(len, drawn(draw_tiers, tiers(), width=width))) <= width


def test_a_narrow_table_says_nothing_of_the_columns_that_it_left_out() -> None:
    wide, narrow = (" ".join(drawn(draw_plan, planned(), width=width)) for width in (80, 40))
    for word in ("│ the card's", "batch: micro", "host: GiB"):
        assert word in wide
        assert word not in narrow
    assert "GiB: of the card's 24.0 GiB" in narrow


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
    assert "!: more than the 4.0 it has" in " ".join(lines)


@pytest.mark.thorough
@pytest.mark.parametrize(("gpus", "host_ram"), [("1x4GB", "4GB"), ("1x3GB", "64GB"), ("1x8GB", "2GB")])
def test_where_nothing_fits_the_first_row_is_the_nearest_and_every_row_says_what_it_lacks(
    gpus: str, host_ram: str
) -> None:
    answer = planned(gpus, host_ram, model="qwen1.5-1.8b", effective_batch=1)
    assert not answer.fits, "or this shows nothing"
    lines = drawn(draw_plan, answer)
    rows = body(lines)
    assert "the nearest first" in " ".join(lines)
    for row, way in zip(rows, worth_showing(answer), strict=True):
        over_ram = way.footprint.host.peak_bytes_per_node > (answer.hardware.host_ram_bytes or 0)
        assert ("RAM" in row) is over_ram
        assert ("GPU" in row) is (way.footprint.gpu.required_bytes > way.gpu_limit_bytes)
    first = worth_showing(answer)[0]
    assert f"The nearest is {strategy_name(first.levers)} with checkpointing" in " ".join(" ".join(lines).split())


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "gpus", "host_ram", "lacks"),
    [("7b_mamba", "4x24GB", "256GB", "GPU"), ("qwen2.5-7b", "4x24GB", "130GB", "RAM")],
)
def test_each_row_above_the_chosen_one_has_its_sentence(model: str, gpus: str, host_ram: str, lacks: str) -> None:
    answer = planned(gpus, host_ram, model=model)
    chosen = chosen_of(answer)
    above = [way for way in worth_showing(answer) if way.pace.step_s < chosen.pace.step_s]
    assert any(lacks in lacking_bytes(way) for way in above), "or this shows nothing"
    faster = [str(said) for said in answer.because if id_of(said) == "plan.faster-but"]
    assert len(faster) == sum(not way.fits for way in above)
    assert all(str(strategy_name(way.levers)) in str(answer.chosen_for) for way in above if way.fits)
    for way in (each for each in above if not each.fits):
        name, why = str(strategy_name(way.levers)).lower(), f" would be faster but {missing(way)}."
        assert any(each.lower().startswith(name) and each.endswith(why) for each in faster)
    slower = [str(said) for said in answer.because if id_of(said) == "plan.fits-too"]
    shown = tuple(str(strategy_name(way.levers)).lower() for way in worth_showing(answer) if way.fits)
    assert all(sentence.lower().startswith(shown) for sentence in slower)


def test_what_is_missing_is_told_for_the_card_and_for_the_host() -> None:
    way = chosen_of(planned())
    assert str(missing(needing(way, 30))).startswith("needs 6.0 GiB more than the card has ")
    poor = replace(way, hardware=replace(way.hardware, host_ram_bytes=2**29), fits=False)
    assert re.fullmatch(r"needs \d+\.\d GiB more host RAM than there is", str(missing(poor)))
    both = replace(needing(way, 30), hardware=poor.hardware)
    assert re.search(r"the card has .*, and \d+\.\d GiB more host RAM than there is$", str(missing(both)))
    tight = str(missing(needing(way, 23.5)))
    assert tight.startswith("would leave only 0.5 GiB of the card free ")


@pytest.mark.thorough
def test_after_an_allowed_change_only_the_new_training_is_shown() -> None:
    answer = planned("1xRTX4090", "32GB", model="llama-3.1-8b", allow="lora", effective_batch=1)
    lines = drawn(draw_plan, answer)
    assert lines[0].startswith("llama-3.1-8b (8.03B), lora rank 8, bf16, on 1 × RTX 4090")
    assert [row[0] for row in body(lines)].count("×") == 0
    assert "Without a change nothing fits. The nearest is " in " ".join(" ".join(lines).split())


def test_a_column_tells_the_gpus_only_where_ways_differ_in_them() -> None:
    answer = planned()
    way = chosen_of(answer)
    one = replace(way, hardware=replace(way.hardware, gpus_per_node=1))
    assert not any("GPUs" in line for line in drawn(draw_ways, [("", way)]))
    assert " GPUs " in drawn(draw_ways, [("", way), ("", one)])[0]


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_nothing_is_said_twice() -> None:
    answer = planned("2x8xA100-80GB")
    lines = [line for line in drawn(draw_plan, answer, width=400) if line.startswith("  - ")]
    assert len(lines) == len(set(lines))
    assert lines[-1] == f"  - {answer.unproven[0]}"


def test_levers_as_flags_leave_out_what_estimate_takes_anyway() -> None:
    answer = planned()
    way = chosen_of(answer)
    plain = replace(
        way.levers,
        method="lora",
        lora=Lora(rank=4),
        engine="zero2",
        sequence=512,
        loss="fused",
        micro_batch=4,
        accumulation=1,
        checkpointing=Checkpointing(layers=None),
    )
    flags = lever_flags(answer, replace(way, levers=plain))
    assert flags[:4] == ["--engine zero2", "--micro-batch 4", "--accum 1", "--checkpointing full"]
    assert {"--method lora", "--lora-rank 4", "--seq 512", "--loss fused"} <= set(flags)
    assert not [flag for flag in flags if flag.startswith(("--lora-targets", "--attention", "--precision", "--world"))]


@pytest.mark.thorough
def test_levers_as_flags_undo_what_the_users_own_command_says() -> None:
    answer = planned(precision="fp32")
    way = chosen_of(answer)
    assert "--precision bf16" in lever_flags(answer, replace(way, levers=replace(way.levers, precision="bf16")))


@pytest.mark.parametrize("width", range(40, 100, 7))
def test_no_line_ends_between_a_flag_and_its_value(width: int) -> None:
    answer = planned("8xRTX4090", "64GB", model="qwen2.5-7b", method="lora")
    lines = drawn(draw_plan, answer, width=width)
    first = next(number for number, line in enumerate(lines) if line.startswith("Levers: "))
    levers = lines[first : lines.index("", first)]
    assert len(levers) > 1, "or this shows nothing"
    for line in levers:
        assert len(line.removeprefix("Levers: ").split()) % 2 == 0, line


@pytest.mark.thorough
def test_cards_and_gpus_are_counted() -> None:
    many, one = drawn(draw_plan, planned("2x24GB")), drawn(draw_plan, planned("1x24GB"))
    assert "on 2 × 24GB cards: " in many[0]
    assert "on 1 × 24GB card: " in one[0]
    assert " GiB on each GPU: " in " ".join(many)
    assert " GiB on the GPU: " in " ".join(one)
    assert "stays free." in " ".join(" ".join(one).split())


@pytest.mark.thorough
def test_a_timeout_that_ends_too_early_is_told_twice() -> None:
    answer = planned(max_steps=200_000)
    assert answer.hours is not None
    assert answer.hours > 2, "or this shows nothing"
    for timeout, is_short in (("1h30m", True), ("300d", False)):
        again = plan(replace(answer.job, timeout=timeout), answer.shape, answer.hardware)
        text = " ".join(" ".join(drawn(draw_plan, again)).split())
        assert (f"more than the timeout of {timeout}." in text) is is_short
        assert (f"The timeout of {timeout} cuts it off: all steps take about" in text) is is_short


@pytest.mark.thorough
def test_time_is_told_in_the_unit_that_people_would_use() -> None:
    told = {1: "about 1 minute for 1 step.", 1000: "minutes for 1,000", 20_000: "hours for", 2_000_000: "days for"}
    for steps, words in told.items():
        assert words in " ".join(drawn(draw_plan, planned(max_steps=steps)))


def test_a_limit_is_named_first() -> None:
    limit = Limit(wanted="seq", value=4096, plan=planned(), because=("It was made for less.",))
    lines = drawn(draw_limit, limit)
    assert lines[0] == "The longest sequence that fits: 4096 tokens."
    assert "  - It was made for less." in lines
    nothing = Limit(wanted="seq", value=None, plan=hopeless(), because=())
    assert drawn(draw_limit, nothing)[0].startswith("No sequence fits")


@pytest.mark.thorough
def test_tiers() -> None:
    job = job_from_flags({"model": "qwen1.5-0.5b", "gpus": "1x8GB", "host_ram": "32GB"})
    shape, hardware = model_of(job), hardware_of(job)
    lines = drawn(draw_tiers, tiers())
    assert any(re.match(r"minimal +\d+\.\d +yes +[\d,]+  sequences of 1024", line) for line in lines)
    one = drawn(draw_tier, plan_tier("minimal", job, shape, hardware, frozenset()))
    assert "what it holds follows from model and sequence: " in " ".join(one)
    large = " ".join(drawn(draw_tier, plan_tier("deepspeed", job, shape, hardware, frozenset())))
    assert "The tier deepspeed does not fit: it needs " in large
    assert "the nearest first" not in large
    assert [row[:4] for row in body(one)] == ["tier", "free"]
    assert "IT CHANGES THE TRAINING:" in one
    assert "The tier brings, where you said nothing:" in large
    needs_adapters = all_tiers(job, shape, hardware, frozenset({"method"}))
    row = next(line for line in drawn(draw_tiers, needs_adapters) if line.startswith("quantized"))
    assert re.match(r"quantized +- +- +-  --tier quantized trains adapters", row)


def test_written_files_and_how_to_start_them(tmp_path: Path) -> None:
    folder = tmp_path / "my plan"
    folder.mkdir()
    files = [folder / name for name in ("deepspeed.json", "training_args.json", "launch.sh")]
    (folder / "launch.sh").write_text("exec torchrun --module tightfit.train worker.json\n", encoding="utf-8")
    started = " ".join(drawn(draw_files, files, width=200))
    assert f"Start it with: tightfit train --plan '{folder}', or bash '{folder}/launch.sh'" in started
    (folder / "launch.sh").write_text("exec llamafactory-cli train llamafactory.yaml\n", encoding="utf-8")
    assert f"Start it with: bash '{folder}/launch.sh'" in " ".join(drawn(draw_files, files, width=200))


def test_a_pipe_sees_no_spinner(capsys: pytest.CaptureFixture[str]) -> None:
    with waiting("pricing"):
        pass
    assert capsys.readouterr() == ("", "")
