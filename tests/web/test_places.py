"""Only runs below the roots are shown, whatever the address says."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tables import table

sys.path.insert(0, str(Path(__file__).parent))

from visits import HTML, client, step_line, written

from tightfit.web import places
from tightfit.web.places import file_at, find_runs

SECRET = "the secret of another folder"


@pytest.fixture
def grounds(tmp_path: Path) -> Path:
    """A root with a run, and beside it a run that is nobody's business."""
    written(tmp_path / "root" / "first", [step_line(1)])
    other = written(tmp_path / "other", [{"event": "warning", "text": SECRET}])
    (other / "logs").mkdir()
    (other / "logs" / "rank-0.log").write_text(SECRET)
    return tmp_path / "root"


@pytest.mark.parametrize(
    "word",
    [
        "0/../other", "0/first/../../other", "0//etc", "0/etc", "0/nowhere", "1/first", "-1/first", "00000/first",
        "first", "", "/", "0/\0", "0/" + "a/" * 3000, "0/" + "x" * 300, "٠/first",
        "0/first/run.json", "0/first/logs", "0/..",
        "0/./../other", "0/~", "0/%2e%2e/other", "0/..\\other",
    ],
)  # fmt: skip
@table("view", ["view", "stream", "log"])
def test_what_is_not_below_the_roots_is_not_there(word: str, view: str, grounds: Path) -> None:
    answer = client(grounds).get(f"/runs/{view}", params={"run": word, "name": "logs/rank-0.log"}, headers=HTML)
    assert answer.status_code == 404
    assert SECRET not in answer.text


@pytest.mark.parametrize(
    "raw", ["0/%2e%2e/other", "0/..%2fother", "0%2f%2e%2e%2fother", "%2fetc", "0/%2e%2e%2f%2e%2e%2fetc"]
)
def test_encoded_dots_lead_nowhere(raw: str, grounds: Path) -> None:
    assert client(grounds).get(f"/runs/view?run={raw}").status_code == 404


def test_a_path_given_whole_is_no_run(grounds: Path) -> None:
    other = grounds.parent / "other"
    assert client(grounds).get("/runs/view", params={"run": f"0/{other}"}).status_code == 404
    assert client(grounds).get("/runs/view", params={"run": str(other)}).status_code == 404


def test_links_out_of_the_roots_are_not_followed(grounds: Path) -> None:
    other = grounds.parent / "other"
    (grounds / "link").symlink_to(other)
    for name in ("events.jsonl", "logs", "plan", "checkpoints", "attempts", "run.json"):
        run = written(grounds / f"run-{name}", [step_line(1)])
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(other / name)
    (other / "plan").mkdir()
    (other / "checkpoints").mkdir()
    (other / "attempts").mkdir()
    visitor = client(grounds)
    for name in (
        "link",
        *(f"run-{name}" for name in ("events.jsonl", "logs", "plan", "checkpoints", "attempts", "run.json")),
    ):
        assert visitor.get("/runs/view", params={"run": f"0/{name}"}).status_code == 404, name
    assert [run.word for run in find_runs([grounds.resolve()]).runs] == ["0/first"]


def test_links_within_the_roots_are(grounds: Path) -> None:
    (grounds / "link").symlink_to(grounds / "first")
    assert client(grounds).get("/runs/view", params={"run": "0/link"}).status_code == 200


def test_a_log_that_is_a_link_out_is_not_shown(grounds: Path) -> None:
    logs = grounds / "first" / "logs"
    logs.mkdir()
    (logs / "rank-0.log").symlink_to(grounds.parent / "other" / "logs" / "rank-0.log")
    (logs / "rank-1.log").write_text("mine, with HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz\n")
    visitor = client(grounds)

    def log(name: str) -> tuple[int, str]:
        answer = visitor.get("/runs/log", params={"run": "0/first", "name": name})
        return answer.status_code, answer.text

    assert log("logs/rank-0.log")[0] == 404
    assert log("logs/rank-1.log") == (200, "mine, with HF_TOKEN=***\n")
    for name in (
        "../other/logs/rank-0.log",
        "/etc/passwd",
        "run.json",
        "events.jsonl",
        "logs",
        "",
        ".log",
        "logs/\0.log",
    ):
        assert log(name)[0] == 404, name
    assert file_at(grounds.resolve() / "first", "logs/rank-0.log") is None


def test_a_pipe_does_not_hold_the_page_up(grounds: Path) -> None:
    run = grounds / "pipe"
    run.mkdir()
    (run / "run.json").write_text("{}")
    os.mkfifo(run / "events.jsonl")
    assert client(grounds).get("/runs/view", params={"run": "0/pipe"}).status_code == 404
    assert client(grounds).get("/runs").status_code == 200


def test_the_search_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path.resolve()
    for number in range(6):
        written(root / f"run-{number}", [step_line(1)])
    written(root.joinpath(*"abcdefgh") / "deep", [step_line(1)])
    written(root / ".hidden" / "run", [step_line(1)])
    written(root / "run-0" / "earlier" / "1", [step_line(1)])
    searched = find_runs([root])
    found, is_all = searched.runs, searched.is_all
    assert is_all
    assert sorted(run.word for run in found) == [f"0/run-{number}" for number in range(6)]
    monkeypatch.setattr(places, "MOST_RUNS", 3)
    assert not find_runs([root]).is_all
    assert len(find_runs([root]).runs) == 3
    assert "There are more" in client(root).get("/runs").text


def test_a_root_can_be_a_run(tmp_path: Path) -> None:
    run = written(tmp_path / "only", [step_line(7)])
    visitor = client(run)
    assert '/runs/view?run=0%2F"' in visitor.get("/runs").text
    assert visitor.get("/runs/view", params={"run": "0/"}).status_code == 200


def test_names_are_text(tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)>&\"'"
    written(tmp_path / name, [step_line(1)])
    for text in (
        client(tmp_path).get("/runs").text,
        client(tmp_path).get("/runs/view", params={"run": f"0/{name}"}).text,
    ):
        assert "<img" not in text
        assert "&lt;img src=x" in text
