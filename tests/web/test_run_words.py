"""What a run says in Chinese: its events, why attempts failed and what was changed, the lights and the warnings."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import get_args

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "runs"))
sys.path.insert(0, str(Path(__file__).parent))

from recorded_attempts import NAMES, recorded
from spoken import PACKAGE, is_told, samples, sentences_in, spoken_in, untold
from visits import step_line

from tightfit.desk.plan import answered
from tightfit.desk.request import read_request
from tightfit.messages import Message, Said
from tightfit.planner.plan import Plan
from tightfit.planner.step_down import PLACES as PLACES_OF_A_PLAN
from tightfit.planner.step_down import Shortfall, StepDown, step_down
from tightfit.runs import events as run_events
from tightfit.runs.attempts import Action
from tightfit.runs.build_lock import describe, remove
from tightfit.runs.cause import blame_build_lock, find_cause
from tightfit.runs.events import Step, event_of
from tightfit.runs.hang import Hung
from tightfit.runs.health import Held, Planned, Seen, judge_health
from tightfit.runs.heartbeat import STAGES, Beat, Quiet
from tightfit.runs.lines import duration, line_of
from tightfit.runs.stacks import Frame, Stand
from tightfit.train.compiled import USUALLY, Compiling
from tightfit.web.retold import retold
from tightfit.web.sentences import FILES, pairs_of, said_in

GIB, MIB = 2**30, 2**20
WAY = "ZeRO-2, optimizer on CPU, micro batch 4 × 1 on 2 ranks"
CAUSE = (
    "Rank 1 was killed from outside (SIGKILL), and not by the kernel for want of memory: its record says nothing of it."
)


# --- the pairs -------------------------------------------------------------------------------------


def test_both_sides_of_a_pair_have_the_same_parts() -> None:
    for english, chinese in pairs_of("zh"):
        holes = [set(re.findall(r"\{(\w+)\}", text)) for text in (english, chinese)]
        assert holes[0] == holes[1], english
        outside = re.sub(r"\[\[.*?\]\]", "", english)
        needed = set(re.findall(r"\{(\w+)\}", re.sub(r"\[\[.*?\]\]", "", chinese)))
        assert needed <= set(re.findall(r"\{(\w+)\}", outside)), f"{english}: what may be missing is always said"


def test_no_pair_stands_twice() -> None:
    english = [each for each, _ in pairs_of("zh")]
    assert sorted({each for each in english if english.count(each) > 1}) == []
    assert len(FILES) == 4


# --- events ----------------------------------------------------------------------------------------


def events() -> Iterator[dict[str, object]]:
    """One of each kind, with all that it may say and with the least."""
    some = {"step": 1200, "folder": "runs/数据a/checkpoints/step-1200", "bytes": 3 * GIB, "seconds": 75.0}
    yield {"event": "eval", "step": 1200, "loss": 2.5, "perplexity": 12.2}
    yield {"event": "eval", "loss": 2.5}
    yield {"event": "probe", "seconds": 3.0, "peak_bytes": GIB}
    yield {"event": "probe"}
    for milestone in ("init", "forward", "backward", "step"):
        yield {"event": "memory", "milestone": milestone, "predicted_bytes": GIB, "measured_bytes": 2 * GIB}
        yield {"event": "memory", "milestone": milestone, "measured_bytes": 3 * MIB}
        yield {"event": "memory", "milestone": milestone, "host_bytes": 3 * GIB}
    yield {"event": "saved", **some}
    yield {"event": "saved", "folder": "model"}
    yield {"event": "pictures", "files": ["runs/a/loss.png", "runs/a/memory.png"]}
    yield {"event": "checkpoint", **some, "blocked_s": 0.5, "background": True}
    yield {"event": "checkpoint", **some}
    yield {"event": "checkpoint"}
    yield {"event": "resumed", **some, "from_engine": "zero2", "from_world": 2, "changed": ["max_steps was 3 and is 5"]}
    yield {"event": "resumed", **some, "from_engine": "zero2", "from_world": 1}
    changed = ["the samples of the data are others", "training.epochs was 1 and is 2"]
    yield {"event": "resumed", "folder": "a", "from_engine": "fsdp2", "from_world": 8, "changed": changed}
    yield {"event": "stopping"}
    for why in ("SIGTERM", "as asked", "another rank was asked", "the job's time is over"):
        yield {"event": "stopping", "text": f"{why}: step 5 of 30 is saved, then the run stops"}
    yield {
        "event": "overflow",
        "step": 5,
        "streak": 3,
        "loss_scale": 4.0,
        "layer": "model.layers.3",
        "where": "forward",
    }
    torn = "it has no manifest.json: its writing did not come to an end"
    yield {"event": "passed_over", "folder": "a b/step-3", "text": torn}
    yield {"event": "attempt", "number": 2, "plan": WAY, "changed": []}


def attempt_events() -> Iterator[dict[str, object]]:
    changed = [
        "ZeRO-2, optimizer on CPU → ZeRO-3, optimizer + weights on CPU", "micro batch × accumulation 4 × 1 → 2 × 2",
        "checkpointing none → layers:12", "loss plain → fused", "GPUs 8 → 4", "pin memory on → off",
        "overlap comm DeepSpeed's choice → off", "reduce bucket 500,000,000 → 50,000,000", "attention eager → sdpa",
        "scan torch → tightfit",
    ]  # fmt: skip
    for count in range(1, len(changed)):
        yield {"event": "attempt", "number": 2, "plan": WAY, "changed": changed[:count]}
    for step, kept, wait, action in product((None, 7), (None, 5), (0, 4.0), get_args(Action)):
        yield {
            "event": "attempt_failed", "number": 1, "kind": "device-oom", "text": CAUSE, "step": step,
            "kept_step": kept, "action": action, "because": "it may not happen again", "wait_s": wait,
        }  # fmt: skip


@pytest.mark.parametrize("told", [*events(), *attempt_events()], ids=lambda told: str(told["event"]))
def test_an_event_is_told(told: dict[str, object]) -> None:
    event = event_of(json.dumps(told))
    assert event is not None
    text, _ = line_of(event)
    assert is_told(text), said_in("zh", text).text


def test_all_events_that_have_a_line_are_tried() -> None:
    tried = {type(event_of(json.dumps(told))).__name__ for told in (*events(), *attempt_events())}
    elsewhere = {"Proof", "Warned", "CheckpointFailed", "Other"}  # below
    silent = {"Started", "Step", "Progress", "Failed", "Ended"}
    assert {each.__name__ for each in get_args(run_events.Event)} == tried | elsewhere | silent


def test_what_is_compiled_is_told() -> None:
    assert untold(str(Compiling(part, 0.0).message) for part in (*USUALLY, "odd")) == []


def test_what_is_proved_at_the_start_is_told() -> None:
    shown = {"7, 7 node", "7, 7 nodes"}  # parts of a sentence
    said = [text.replace(" (7)", " (7%)") for text in spoken_in("train/proof.py") if text not in shown]
    said = [text.replace("started by 7 (7%)", "started by torchrun (cuda, 2 nodes)") for text in said]
    said = [text.replace("as planned (7%)", "as planned (7)") for text in said]
    assert len(said) > 5
    assert untold(f"{mark} {text}" for text in said for mark in "✓✗") == []


def test_what_the_worker_warns_of_is_told(tmp_path: Path) -> None:
    locks = [tmp_path / "fused_adam" / "lock", tmp_path / "cpu_adam" / "lock", tmp_path / "c" / "lock"]
    said = [
        *spoken_in("train/scan.py"), remove(locks[:1]), remove(locks), describe(locks[:1]), describe(locks[:2]),
        "dtype repaired: model.norm.weight was float32 and is bfloat16",
        *(f"Only the weights of /a/global_step3 were taken over, and training begins at step 0: {why}." for why in (
            "without ZeRO's files of its ranks it holds no optimizer states that have names",
            "it trained 46 numbers, and this job trains 1,045", "its optimizer's moments are not those of adafactor",
            "its optimizer kept no exp_avg and exp_avg_sq, which adamw goes on with",
        )),
        "Of a DeepSpeed checkpoint weights, moments and step are taken over; the learning rate's schedule and the "
        "order of the samples are this job's own, from step 1,500 on.",
        "step 3 is left out, as --allow skip-data says: samples 4, 5, 6",
        "the flash-attn package is not installed: sdpa is used", "flash attention needs a GPU: sdpa is used",
        "No data is named: the samples are random tokens.",
        "The tokenizer has no chat template: chats are laid out by the 'chatml' one.",
        *(text for text in spoken_in("train/data/dialogues.py") if text.startswith("RealPersonaChat")),
    ]  # fmt: skip
    assert untold(f"! {text}" for text in said) == []
    failed = [text for text in spoken_in("train/checkpoint.py") if text.startswith("no checkpoint of")]
    assert len(failed) == 2
    assert untold(f"✗ NO CHECKPOINT at step 5: {text}; the training goes on" for text in failed) == []


def test_what_goes_on_is_told() -> None:
    said = [text for path in ("worker", "assemble", "resume") for text in sentences_in(f"train/{path}.py", "told")]
    said += [text for path in ("worker", "assemble", "resume") for text in sentences_in(f"train/{path}.py", "progress")]
    said += ["tokenising", "reading a.jsonl", "fetching model.safetensors", "converting step-3"]
    assert len(said) > 8
    assert untold(iter(said)) == []


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(45, "45 秒"), (200, "3 分 20 秒"), (7500, "2 小时 05 分"), (400_000, "4.6 天"), (0.4, "0.4 秒")],
)
def test_times_are_told(seconds: float, told: str) -> None:
    assert said_in("zh", duration(seconds)).text == told


# --- attempts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("readable", [True, False], ids=["kernel", "no-kernel"])
def test_why_a_recorded_attempt_failed_is_told(name: str, readable: bool) -> None:
    verdict = find_cause(recorded(name, kernel_readable=readable))
    told = said_in("zh", verdict.cause)
    assert not told.is_foreign, verdict.cause
    assert [fix.text for fix in verdict.fixes if said_in("zh", fix.text).is_foreign] == []


def hangs() -> Iterator[Hung]:
    for stage in STAGES:
        beats = tuple(Beat(rank=rank, count=1, stage=stage, step=4) for rank in (0, 1))
        quiet = Quiet(rank=0, silent_s=300.0, beats=beats)
        stand = Stand(rank=1, main=(Frame(file="/a/torch/distributed/b.py", line=3, name="all_reduce"),))
        placed = Stand(rank=0, main=(Frame(file="/a/tightfit/train/__main__.py", line=3, name="f"),))
        for stands in ((), (stand,), (placed, stand)):
            yield Hung(quiet=quiet, stands=stands)


def test_who_hangs_and_where_is_told() -> None:
    assert untold(hung.sentence for hung in hangs()) == []


def test_who_waits_for_a_build_is_told(tmp_path: Path) -> None:
    verdict = find_cause(recorded(NAMES[0]))
    for who, locks in product(
        (Message("runs.rank", rank=3), Message("runs.the-command")), ((), (tmp_path / "a" / "lock",))
    ):
        found = blame_build_lock(verdict, who, locks)
        assert is_told(found.cause, stays=str(tmp_path)), said_in("zh", found.cause).text
        assert all(not said_in("zh", fix.text).is_foreign for fix in found.fixes)


@pytest.mark.parametrize(
    "path",
    [
        "cli/train_again.py",
    ],
)
def test_what_follows_is_told(path: str) -> None:
    """Why something is done, as the code says it: parts of a sentence are put together below."""
    tree = ast.parse((PACKAGE / path).read_text(encoding="utf-8"))
    said: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "because":
            said += samples(node.value)
    said += [text for callee in ("stop", "_same_plan") for text in sentences_in(path, callee)]
    parts = ("7", "to go on would", "no plan needs", "7: make room", "what would fit (7)", "what may fit (7)")
    whole = [text for text in said if not text.startswith(parts)]
    assert untold(iter(whole)) == []


def test_what_follows_is_told_where_it_is_put_together() -> None:
    older = "the first step after the newest one always fails"
    carried = "micro batch × accumulation 4 × 1 → 2 × 2; ZeRO-2 → ZeRO-3"
    ways = "--allow skip-data leaves these samples out"
    said = [
        f"to go on would change the training: {ways}",
        f"to go on would change the training: {ways}, --allow precision goes on in bf16",
        "no plan needs less of the host, which others use too: it is tried once more",
        "no plan needs less, and this one was predicted to need far less: it is tried once more",
        "runs/a has 12 MB left and needs 300 MB: make room, and the same command goes on",
        f"what would fit ({carried}) cannot go on from the checkpoint of step 1,200",
        f"{older}, so the run goes on from step-00000005", f"{older}, and there is no older one",
        "5 attempts in a row kept no new step (--max-attempts)", "step 12 is left out, as --allow skip-data says",
        "it may not happen again; it goes on from checkpoint-20",
        "it may not happen again; it finds checkpoint-20 by itself",
        "memory was missing, and the next scheme is tried; as allowed, sequences are cut at 512 tokens instead of "
        "1024; it begins again, since there is no checkpoint to go on from",
        "memory was missing, and the next scheme is tried; the adapter of step 5 is kept (results go to out/b), and "
        "optimizer, schedule and data start afresh",
        "what may fit (optimizer on the host) cannot go on from checkpoint-3 with its optimizer: change that and "
        "start anew in another folder, or say --retry-anyway to begin again",
        "nothing is left to change in ds.json without leave: --allow quantize would train the adapters on 4-bit "
        "weights; --allow shorter-seq would cut the sequences",
    ]  # fmt: skip
    assert untold(iter(said)) == []


@pytest.mark.thorough
def test_what_a_smaller_plan_changes_and_why_is_told() -> None:
    said: list[str] = []
    changed: set[str] = set()
    shortfalls = [
        *({"where": "gpu", "phase": phase, "reason": "memory"} for phase in (None, "loss", "step")),
        *({"where": "gpu", "phase": phase, "reason": "fragmentation"} for phase in (None, "backward")),
        *({"where": "host", "phase": None, "reason": reason} for reason in ("memory", "pinned")),
    ]
    for model, gpus, method in (("qwen2.5-7b", "4x24GB", "lora"), ("tiny_llama", "1x24GB", "full")):
        plan, _ = answered(
            read_request({"model": model, "gpus": gpus, "method": method, "seq": 2048, "host_ram": "256GB"})
        )
        assert isinstance(plan, Plan)
        for shortfall, size in product(shortfalls, (0, GIB)):
            found = step_down(plan, Shortfall(**shortfall, missing_bytes=size))
            said.append(" ".join(map(str, found.because)))
            changed.update(map(str, found.changed) if isinstance(found, StepDown) else ())
    assert len(set(said)) > 10
    assert untold(iter(said)) == []
    assert changed
    assert [each for each in changed if said_in("zh", each).is_foreign] == []


# --- lights and warnings ---------------------------------------------------------------------------


def seen_steps(count: int, **more: object) -> list[Step]:
    made = []
    for number in range(1, count + 1):
        line = step_line(number, 1000, 5 - number / 100, now_bytes=4 * GIB, peak_bytes=8 * GIB)
        values = {key: value(number) if callable(value) else value for key, value in more.items()}
        line["memory"].update(values.pop("memory", {}))
        event = event_of(json.dumps({**line, **values}))
        assert isinstance(event, Step)
        made.append(event)
    return made


def sights() -> Iterator[Seen]:
    card = Held(name="GPU 0", used_bytes=int(23.8 * GIB), total_bytes=24 * GIB)
    host = Held(name="host RAM", used_bytes=20 * GIB, total_bytes=64 * GIB)
    short = Held(name="host RAM", used_bytes=62 * GIB, total_bytes=64 * GIB)
    unknown = Held(name="host RAM", used_bytes=None, total_bytes=None)
    plan = Planned(peak_bytes=9 * GIB, required_bytes=10 * GIB, ranks_here=1, offloads=False, on_gpu=True)
    offloading = Planned(peak_bytes=GIB, required_bytes=10 * GIB, ranks_here=2, offloads=True, on_gpu=True)
    falling = tuple((10.0 * number, (40 - number) * GIB) for number in range(40))
    usual = {"memories": (card,), "host": host, "has_run": True, "planned": plan}
    yield Seen(memories=(unknown,), host=unknown)
    yield Seen(**usual)
    yield Seen(**usual, steps=seen_steps(40))
    yield Seen(**usual, steps=seen_steps(40, loss=None))
    yield Seen(**usual, steps=seen_steps(40, loss=0.0))
    yield Seen(**usual, steps=seen_steps(40, loss=2.0))
    yield Seen(**usual, steps=seen_steps(40, loss=lambda n: 1.0 + n))
    yield Seen(**usual, steps=seen_steps(40, loss=lambda n: 5 + n / 50))
    yield Seen(**usual, steps=seen_steps(40), oom=CAUSE, oom_is_last=True)
    yield Seen(**{**usual, "planned": offloading, "host": short}, steps=seen_steps(40), own=(card,))
    yield Seen(**{**usual, "host": short})
    yield Seen(**usual, host_free=falling)
    yield Seen(**{**usual, "planned": offloading}, host_free=falling)
    for memory in ("now_bytes", "host_bytes"):
        grows = seen_steps(60, memory=lambda n, name=memory: {name: 4 * GIB + n * 200 * MIB})
        yield Seen(**usual, steps=grows)
        yield Seen(**{**usual, "host": unknown}, steps=grows, own=(card,))
    yield Seen(**usual, steps=seen_steps(40, alloc_retries=lambda n: n))
    yield Seen(**usual, steps=seen_steps(40, alloc_retries=lambda n: int(n == 40)))
    yield Seen(**usual, steps=seen_steps(40, loss_scale=lambda n: 65536.0 / 2 ** max(0, n - 30)))


def test_lights_and_warnings_are_told() -> None:
    said: list[Said] = []
    for seen in sights():
        found = judge_health(seen)
        said += [*found.warnings, *(light.text for light in found.lights if light.text)]
    beginnings = {" ".join(str(text).split()[:3]) for text in said}
    wanted = ("host RAM is", "the allocator had", "the loss scale", "the peak of", "GPU memory grows", "GPU 0 has")
    assert [each for each in wanted if each not in beginnings] == []
    assert untold(iter(said)) == []


# --- the rest --------------------------------------------------------------------------------------


def test_checkpoints_that_are_not_whole_are_told() -> None:
    assert untold(sentences_in("runs/checkpoints.py", "Torn", "Unknown")) == []


def test_places_are_told() -> None:
    assert untold(iter({*(str(each).strip() for each in PLACES_OF_A_PLAN.values())})) == []


def test_a_message_of_the_stream_is_told_and_the_rest_of_it_stays() -> None:
    sections = {
        "events": [{"at": 1.0, "text": "✓ checkpoint at step 5", "mood": "good"}],
        "attempts": [
            {"number": 1, "plan": WAY, "cause": {"id": "oom-logits", "sentence": CAUSE, "rank": 1},
             "evidence": ["rank-1.log:17: torch.OutOfMemoryError"], "changed": ["checkpointing none → full"],
             "next": {"action": "smaller plan", "because": "it may not happen again"}}],
        "checkpoints": [{"step": 3, "torn": "it cannot be read"}, {"step": 2, "torn": None}],
        "trouble": {"why": "no such file or directory"}, "series": {"rows": [[1, 0.1, None]]},
    }  # fmt: skip
    message = f"id: ab-1\ndata: {json.dumps(sections)}\n\n".encode()
    assert retold(message, "en") is message
    assert retold(b"retry: 2000\n\n", "zh") == b"retry: 2000\n\n"
    assert retold(b"event: beat\ndata: {}\n\n", "zh") == b"event: beat\ndata: {}\n\n"
    told = retold(message, "zh")
    assert told.startswith(b"id: ab-1\ndata: ")
    assert told.endswith(b"}\n\n")
    found = json.loads(told.partition(b"data: ")[2])
    assert found["events"][0]["text"] == "✓ 第 5 步的检查点"
    assert found["attempts"][0]["plan"] == "ZeRO-2，优化器卸载到 CPU，micro batch 4 × 1，2 个 rank"
    assert found["attempts"][0]["next"] == {"action": "换用更省的方案", "because": "可能不会再发生"}
    assert found["attempts"][0]["evidence"] == sections["attempts"][0]["evidence"]
    assert found["checkpoints"] == [{"step": 3, "torn": "无法读取"}, {"step": 2, "torn": None}]
    assert (found["trouble"], found["series"]) == ({"why": "文件或目录不存在"}, sections["series"])
