"""GPUs in a row, each with some of the layers: what the fullest holds, what they wait for, where a plan takes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product
from typing import Any

import pytest

from tightfit import memory
from tightfit.desk.estimate import estimated
from tightfit.desk.request import read_request
from tightfit.hardware.named import read_hardware
from tightfit.hardware.words import connect
from tightfit.inputs.flags import levers_from_flags
from tightfit.job.file import job_from_flags
from tightfit.memory import Scale, required_bytes
from tightfit.memory.overhead import COMMUNICATOR_BYTES
from tightfit.memory.pipeline import count_depths, lay_out
from tightfit.messages import Message
from tightfit.model.load import shape_from_config
from tightfit.pace import KernelChoice, clock_of, pace, step_seconds, time_row
from tightfit.planner import plan, question_of
from tightfit.planner.balance import balance
from tightfit.planner.question import Question
from tightfit.planner.step_down import Shortfall, StepDown, step_down
from tightfit.types import Checkpointing, ConfigError, Hardware, Levers

LLAMA = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
         "num_key_value_heads": 8, "vocab_size": 128_256, "num_hidden_layers": 32,
         "tie_word_embeddings": False}  # fmt: skip
SHAPE = shape_from_config(LLAMA, "llama-8b")
TIED = shape_from_config({**LLAMA, "tie_word_embeddings": True}, "llama-8b-tied")
ROWS = [(2, 1), (4, 1), (8, 1), (4, 2)]


def levers(gpus: int = 1, stages: int = 1, **flags: Any) -> Levers:
    row = {"pipeline_parallel": gpus, "stages_per_gpu": stages}
    return levers_from_flags({"engine": "fsdp2", "seq": 4096, "accum": 16, **row, **flags}, SHAPE)


def nodes(count: int, network: str = "100Gb") -> Hardware:
    return connect(read_hardware(f"{count}x8xA100-80GB"), network, None)


# --- bytes ----------------------------------------------------------------------------------------


def test_micro_batches_that_wait_keep_their_activations() -> None:
    """The first of four GPUs has a quarter of the layers and four micro batches in hand: as much as one has of all."""
    whole = memory.estimate(SHAPE, levers(checkpointing="none"), 8).gpu.phases["forward"].components["activations"]
    row = memory.estimate(SHAPE, levers(4, checkpointing="none"), 8)
    assert row.pipeline_gpu == 0
    assert row.gpu.phases["forward"].components["activations"] == pytest.approx(whole, rel=0.1)
    fewer = memory.estimate(SHAPE, levers(4, checkpointing="none", accum=1), 8).gpu.phases["forward"].components
    assert fewer["activations"] < whole / 3


def test_interleaved_stages_have_more_in_hand() -> None:
    one, two = (memory.estimate(SHAPE, levers(4, stages, checkpointing="none"), 8).gpu for stages in (1, 2))
    kept = [each.phases["forward"].components["activations"] for each in (one, two)]
    assert 1.2 * kept[0] < kept[1] < 1.6 * kept[0]


def test_the_fullest_gpu_is_the_one_with_the_head_where_layers_keep_little() -> None:
    row = memory.estimate(SHAPE, levers(4, method="lora", checkpointing="full"), 8)
    assert row.pipeline_gpu == 3
    assert row.gpu.peak_phase == "loss"
    assert row.gpu.phases["loss"].components["logits"] > 0
    assert [said.id for said in row.because].count("price.fullest-of-row") == 1


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize(("gpus", "stages"), ROWS)
def test_what_a_search_weighs_is_what_is_estimated(method: str, gpus: int, stages: int) -> None:
    hardware = nodes(1)
    for word, tensor in product(("none", "layers:1", "layers:3", "full"), (1, 8 // gpus)):
        asked = levers(gpus, stages, method=method, checkpointing=word, tensor_parallel=tensor)
        scale, said = Scale(SHAPE, asked, hardware), memory.estimate(SHAPE, asked, 8, hardware).gpu
        totals = scale.totals(asked.checkpointing)
        assert (totals.peak, totals.required) == (said.peak_bytes, said.required_bytes)
        assert max(scale.floor.held(asked.checkpointing)) <= said.peak_bytes
        assert scale.floor.after <= said.peak_bytes


def test_ranks_that_share_layers_hold_and_send_their_part_of_each_stage() -> None:
    """Of as many GPUs, so that what rests is the same; what waits is the part of a rank's tokens, but for what each
    layer reads whole."""
    one, two = (memory.estimate(SHAPE, levers(4, tensor_parallel=n, checkpointing="full"), 8).gpu for n in (1, 2))
    assert two.phases["step"].total_bytes == pytest.approx(one.phases["step"].total_bytes, rel=1e-3)
    kept = [each.phases["forward"].components["activations"] for each in (one, two)]
    assert kept[1] == pytest.approx(kept[0] / 2, rel=0.05)
    tied = memory.estimate(TIED, levers(2, tensor_parallel=2, checkpointing="full"), 8).gpu.phases["step"].components
    assert tied["buckets"] == 128_256 * 4096 * 4 // 4


def test_both_ends_have_a_tied_embedding() -> None:
    untied, tied = ({gpu.place: gpu.shape.parameters for gpu in lay_out(shape, levers(2))} for shape in (SHAPE, TIED))
    assert tied == untied
    step = memory.estimate(TIED, levers(2, checkpointing="full"), 8).gpu.phases["step"].components
    assert step["buckets"] == 128_256 * 4096 * 4 // 4


def test_a_rank_loads_its_stage_alone() -> None:
    small, large = (memory.estimate(SHAPE, levers(gpus, offload_param="cpu", offload_optimizer="cpu"), 8).host
                    for gpus in (8, 1))  # fmt: skip
    assert small.peak_bytes_per_rank < 1.5 * large.peak_bytes_per_rank


# --- seconds --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gpus", "stages"), ROWS)
def test_a_row_waits_for_its_first_and_its_last_micro_batch(gpus: int, stages: int) -> None:
    found = pace(SHAPE, levers(gpus, stages, accum=32), nodes(1))
    computed = found.step_s - found.causes["pipeline bubble"]
    share = (gpus - 1) / stages / 32
    assert found.causes["pipeline bubble"] == pytest.approx(share * computed, rel=0.25)
    assert sum(found.causes.values()) == pytest.approx(found.step_s)


def test_interleaving_never_lengthens_the_bubble_and_hands_on_more() -> None:
    for gpus in (2, 4, 8):
        for micro_batches in (gpus, 4 * gpus):
            one, two = (pace(SHAPE, levers(gpus, stages, accum=micro_batches), nodes(2)).causes for stages in (1, 2))
            assert two["pipeline bubble"] < one["pipeline bubble"]
            assert two["communication"] > one["communication"]


def test_of_a_slow_network_a_row_of_nodes_takes_hidden_states_alone() -> None:
    wide, narrow = nodes(4, "8x400Gb"), nodes(4, "25Gb")
    flat, row = levers(accum=4), levers(4, accum=16)
    lost = [pace(SHAPE, each, narrow).step_s - pace(SHAPE, each, wide).step_s for each in (flat, row)]
    assert lost[1] < 0.1 * lost[0]


def test_one_rank_that_poses_waits_for_nobody() -> None:
    assert "pipeline bubble" not in pace(SHAPE, levers(4), nodes(1), rehearsal=True).causes


@pytest.mark.parametrize("compile", ["off", "layers"])
@pytest.mark.parametrize(("gpus", "stages"), ROWS)
def test_the_clock_of_a_search_agrees(compile: str, gpus: int, stages: int) -> None:  # noqa: A002
    for hardware in (nodes(1), nodes(4, "25Gb"), read_hardware("8xRTX4090")):
        shared = {"tensor_parallel": 2} if compile == "off" and gpus < 8 else {"method": "lora"}
        for more in ({}, {"method": "lora"}, shared):
            asked = levers(gpus, stages, compile=compile, **more)
            choice = KernelChoice(asked.attention, asked.scan, asked.buckets)
            times = clock_of(SHAPE, asked, hardware).times(asked, choice)
            assert len(times) == count_depths(SHAPE, asked) + 1
            for depth in (0, 1, len(times) - 1):
                at = replace(asked, checkpointing=Checkpointing(layers=depth))
                assert times[depth] == pytest.approx(step_seconds(SHAPE, at, hardware), rel=1e-9)


def test_a_rehearsal_has_the_seconds_of_the_gpu_that_is_rehearsed() -> None:
    """The first has 8 layers and is the fullest; the second has 9 and is the slowest."""
    asked, hardware = levers(4, checkpointing="none", stage_layers="8,9,9,6"), nodes(1)
    assert memory.estimate(SHAPE, asked, 8, hardware).pipeline_gpu == 0
    assert max(time_row(SHAPE, asked, hardware, {})[1], key=lambda each: each.whole).place == 1
    rehearsed, whole = (pace(SHAPE, asked, hardware, rehearsal=each).causes["arithmetic"] for each in (True, False))
    assert rehearsed == pytest.approx(8 / 9 * whole, rel=1e-3)


# --- layers that are moved ------------------------------------------------------------------------

SMALL = shape_from_config({**LLAMA, "num_hidden_layers": 9}, "llama-2b")


def ask(card_bytes: int) -> Question:
    """Of GPUs with as much memory."""
    hardware = nodes(1)
    hardware = replace(hardware, gpu=replace(hardware.gpu, memory_bytes=card_bytes))
    job = job_from_flags({"model": LLAMA, "seq": 4096, "pipeline_parallel": 4, "margin": 0.0})
    return question_of(job, SMALL, hardware)


def cut(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to share out so many layers, each at least one."""
    for ends in combinations(range(1, total), parts - 1):
        yield tuple(end - begin for begin, end in pairwise((0, *ends, total)))


@pytest.mark.parametrize(
    ("gpus", "stages", "flags"),
    [
        (4, 1, {"checkpointing": "none"}),
        (4, 1, {"checkpointing": "full", "loss": "fused"}),
        (3, 1, {"checkpointing": "layers:1", "method": "lora"}),
        (2, 2, {"checkpointing": "none", "loss": "fused"}),
    ],
)
def test_no_split_that_fits_is_faster(gpus: int, stages: int, flags: dict[str, Any]) -> None:
    """Against every split, on cards from those that nothing fits to ample ones."""
    asked = levers(gpus, stages, **flags)
    splits = [replace(asked, stage_layers=",".join(map(str, each))) for each in cut(SMALL.n_layers, gpus * stages)]
    question = ask(2**37)
    needs = [memory.estimate(SMALL, each, 8, question.hardware).gpu.required_bytes for each in splits]
    times = [step_seconds(SMALL, each, question.hardware) for each in splits]
    least, even = min(needs), memory.estimate(SMALL, asked, 8, question.hardware).gpu.required_bytes
    for card in (least - 2**20, least + 2**20, (least + even) // 2, even - 2**20, 2 * even):
        question = ask(card)
        found = balance(question, asked)
        fitting = [seconds for seconds, need in zip(times, needs, strict=True) if need <= card]
        assert (found.excess == 0) == bool(fitting), card
        if fitting:
            assert found.step_s == pytest.approx(step_seconds(SMALL, found.levers, question.hardware), rel=1e-9)
            assert found.step_s <= min(fitting) * 1.0001, (card, found.levers.stage_layers)


# --- plans ----------------------------------------------------------------------------------------


def test_a_plan_takes_a_row_of_nodes_where_the_network_is_slow_and_none_on_one_node() -> None:
    flags = {"model": LLAMA, "seq": 4096, "effective_batch": 128}
    slow = plan(job_from_flags(flags), SHAPE, nodes(4, "25Gb")).chosen
    assert slow is not None
    assert slow.levers.pipeline_parallel == 4
    assert slow.effective_batch == 128
    assert slow.levers.accumulation >= 4
    one = plan(job_from_flags(flags), SHAPE, nodes(1))
    assert one.chosen is not None
    assert {way.levers.pipeline_parallel for way in (one.chosen, *one.alternatives)} == {1}


def test_on_very_many_gpus_those_of_a_stage_share_its_layers() -> None:
    hardware = connect(read_hardware("128x8xH100"), "100Gb", None)
    large = {**LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
             "num_hidden_layers": 80}  # fmt: skip
    flags = {"model": large, "seq": 2048, "effective_batch": 4096}
    chosen = plan(job_from_flags(flags), shape_from_config(large, "llama-70b"), hardware).chosen
    assert chosen is not None
    assert chosen.levers.tensor_parallel > 1
    assert chosen.levers.pipeline_parallel > 1
    assert chosen.world % chosen.levers.ranks_per_sample == 0


def test_a_pair_that_was_asked_for() -> None:
    flags = {"model": LLAMA, "seq": 4096, "pipeline_parallel": 2, "tensor_parallel": 2}
    found = plan(job_from_flags(flags), SHAPE, nodes(1))
    assert found.chosen is not None
    for way in (found.chosen, *found.alternatives):
        assert (way.levers.tensor_parallel, way.levers.pipeline_parallel) == (2, 2)
    assert found.effective_batch % found.chosen.levers.data_ranks(8) == 0


def test_a_row_that_was_asked_for_shares_a_batch_with_too_few_sequences() -> None:
    flags = {"model": LLAMA, "seq": 4096, "pipeline_parallel": 2, "effective_batch": 2}
    found = plan(job_from_flags(flags), SHAPE, nodes(1))
    assert found.chosen is not None
    assert {way.levers.pipeline_parallel for way in (found.chosen, *found.alternatives)} == {2}
    assert {way.levers.row_parts for way in (found.chosen, *found.alternatives) if way.world == 8} == {2, 4}


def test_after_a_failure_a_pair_holds_less_and_stays_one() -> None:
    flags = {"model": LLAMA, "seq": 8192, "pipeline_parallel": 2, "tensor_parallel": 2, "effective_batch": 32}
    first = plan(job_from_flags(flags), SHAPE, nodes(1))
    found = step_down(first, Shortfall(where="gpu", missing_bytes=4 << 30, phase="backward"))
    assert isinstance(found, StepDown)
    assert first.chosen is not None
    assert found.plan.chosen is not None
    after, before = found.plan.chosen, first.chosen
    assert (after.levers.tensor_parallel, after.levers.pipeline_parallel) == (2, 2)
    assert after.footprint.gpu.phases["backward"].total_bytes < before.footprint.gpu.phases["backward"].total_bytes - (
        4 << 30
    )


def test_a_row_that_was_asked_for() -> None:
    flags = {"model": LLAMA, "seq": 4096, "pipeline_parallel": 4, "stages_per_gpu": 2}
    found = plan(job_from_flags(flags), SHAPE, nodes(1))
    assert found.chosen is not None
    assert {way.levers.pipeline_parallel for way in (found.chosen, *found.alternatives)} == {4}
    assert found.chosen.levers.stages_per_gpu == 2
    assert found.effective_batch == 32  # as many sequences a GPU as without a row
    (default,) = [said for said in found.because if isinstance(said, Message) and said.id == "plan.default-batch"]
    assert str(default).endswith("32 sequences per step, 4 per GPU.")
    assert found.chosen.levers.micro_batch * found.chosen.levers.accumulation == 16


def test_a_plan_moves_layers_where_the_split_by_arithmetic_has_no_room() -> None:
    """In GPUs that hold all of a stage's states, and none that could wait on the host."""
    flags = {"model": LLAMA, "seq": 4096, "pipeline_parallel": 4, "offload_param": "none"}
    hardware = read_hardware("8xRTX4090")
    even = plan(job_from_flags({**flags, "stage_layers": "8,9,9,6"}), SHAPE, hardware)
    assert even.chosen is None
    found = plan(job_from_flags(flags), SHAPE, hardware)
    assert found.chosen is not None
    assert found.chosen.levers.stage_layers == "7,9,9,7"
    assert found.chosen.footprint.gpu.required_bytes <= found.chosen.gpu_limit_bytes
    said = {each.id: str(each) for each in found.chosen.because if isinstance(each, Message)}
    assert said["plan.row-of-gpus"].startswith("The layers go to 4 GPUs in a row: 7, 9, 9 and 7.")
    assert said["plan.layers-moved-for-room"].startswith("By arithmetic alone it would be 8, 9, 9 and 6, and one")


def test_a_plan_moves_layers_rather_than_recompute_more() -> None:
    flags = {"model": LLAMA, "seq": 4096, "pipeline_parallel": 4, "method": "lora"}
    hardware = read_hardware("4xRTX4090")
    even = plan(job_from_flags({**flags, "stage_layers": "8,9,9,6"}), SHAPE, hardware).chosen
    found = plan(job_from_flags(flags), SHAPE, hardware).chosen
    assert even is not None
    assert found is not None
    assert even.levers.checkpointing.layers != 0
    assert (found.levers.checkpointing.layers, found.levers.stage_layers) == (0, "7,9,9,7")
    assert found.pace.step_s < even.pace.step_s


def test_no_stage_recomputes_more_layers_than_the_longest_has() -> None:
    flags = {"model": "llama-3.1-8b", "engine": "fsdp2", "pipeline_parallel": 4, "checkpointing": "layers:10"}
    with pytest.raises(ConfigError, match="use layers:9 at most, or full"):
        plan(job_from_flags(flags), SHAPE, nodes(1))
    with pytest.raises(ConfigError, match="use layers:9 at most, or full"):
        estimated(read_request({**flags, "world": 8}))
    longer = {**flags, "world": 8, "stage_layers": "10,9,9,4"}
    assert estimated(read_request(longer)).levers.checkpointing.layers == 10


def test_every_group_of_a_layout_has_a_communicator_in_what_a_search_requires() -> None:
    asked, hardware = levers(4, shard_within=2), nodes(1)
    totals = Scale(SHAPE, asked, hardware).totals(asked.checkpointing)
    assert totals.require(max(totals.peak, totals.init)) == totals.required
    assert totals.require(0) - required_bytes(0, hardware, 1) == (asked.groups - 1) * COMMUNICATOR_BYTES


def test_a_batch_that_rows_cannot_share() -> None:
    flags = {"model": LLAMA, "seq": 4096, "pipeline_parallel": 2, "effective_batch": 6}
    with pytest.raises(ConfigError) as raised:
        plan(job_from_flags(flags), SHAPE, nodes(1))
    assert raised.value.said.id == "plan.uneven-batch"
