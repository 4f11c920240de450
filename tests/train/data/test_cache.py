"""The cache on disk: built once, found again by content, never half there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import warm_desk
from tightfit.messages import Message
from tightfit.train.data.cache import stage
from tightfit.train.data.chat import SHIPPED
from tightfit.train.data.samples import Split, open_samples
from tightfit.train.data.spec import DataSpec
from tightfit.types import ConfigError

Built = Callable[..., Split]

BUILD = """
import sys
from pathlib import Path
from tightfit.train.data.samples import open_samples, prepare
from tightfit.train.data.spec import DataSpec
from tightfit.train.data.tokens import byte_tokenizer

def main():
    spec, cache = DataSpec(path=sys.argv[1], sequence=256), Path(sys.argv[2])
    prepare(spec, byte_tokenizer(), cache, lambda *what: print(*what, flush=True))
    print("built", open_samples(spec, byte_tokenizer(), cache).train.fingerprint)

if __name__ == "__main__":
    main()
"""


def big_text(path: Path, megabytes: int) -> Path:
    text = (SHIPPED / "stories.txt").read_text(encoding="utf-8")
    with path.open("w", encoding="utf-8") as file:
        for _ in range(megabytes * 2**20 // len(text.encode()) + 1):
            file.write(text)
    return path


def builder(tmp_path: Path, data: Path, **more: Any) -> subprocess.Popen[str]:
    script = tmp_path / "build.py"
    script.write_text(BUILD, encoding="utf-8")
    words = [sys.executable, str(script), str(data), str(tmp_path / "cache")]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)


def test_the_second_start_reads_no_data(built: Built, bytes_tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("some text " * 100, encoding="utf-8")
    spec = DataSpec(path=str(path), sequence=64)
    told: list[Any] = []
    first = built(spec, bytes_tokenizer, told)
    assert told[0] == (0, 1000, Message("data.tokenising"))
    assert told[-1] == (1000, 1000, Message("data.tokenising"))
    told.clear()
    again = built(spec, bytes_tokenizer, told)
    assert told == []
    assert again.train.fingerprint == first.train.fingerprint


@pytest.mark.thorough
def test_the_key_is_the_content(built: Built, bytes_tokenizer: Any, words_tokenizer: Any, tmp_path: Path) -> None:
    path, copy = tmp_path / "a.txt", tmp_path / "b.txt"
    path.write_text("some text " * 100, encoding="utf-8")
    copy.write_text("some text " * 100, encoding="utf-8")

    def fingerprint(tokenizer: Any = bytes_tokenizer, **changed: Any) -> str:
        spec = DataSpec(**{"path": str(path), "sequence": 64, **changed})
        return built(spec, tokenizer).train.fingerprint

    same = fingerprint()
    assert fingerprint(path=str(copy)) == same
    assert fingerprint(seed=1) == same  # the order is not the data
    others = [
        fingerprint(words_tokenizer),
        fingerprint(sequence=32),
        fingerprint(template="gemma"),
        fingerprint(max_samples=3),
        fingerprint(packing=True),
        fingerprint(evaluation_split=0.1),
        fingerprint(evaluation_split=0.1, seed=1),
    ]
    path.write_text("other text " * 100, encoding="utf-8")
    assert len({same, *others, fingerprint()}) == len(others) + 2


def test_all_ranks_map_one_file(built: Built, bytes_tokenizer: Any, cache: Path) -> None:
    spec = DataSpec(path="shipped:text", sequence=64)
    train = built(spec, bytes_tokenizer).train
    assert isinstance(train.lengths, np.memmap)
    assert isinstance(train[0].ids, np.memmap)
    other = open_samples(spec, bytes_tokenizer, cache).train
    assert [other[at].ids.tolist() for at in (0, 7)] == [train[at].ids.tolist() for at in (0, 7)]


def test_another_seed_or_packing_tokenises_nothing(built: Built, bytes_tokenizer: Any) -> None:
    told: list[Any] = []
    built(DataSpec(path="shipped:text", sequence=64), bytes_tokenizer, told)
    told.clear()
    built(DataSpec(path="shipped:text", sequence=64, packing=True, evaluation_split=0.2), bytes_tokenizer, told)
    assert told == []


def test_a_folder_that_cannot_be_written_is_one_sentence(bytes_tokenizer: Any, tmp_path: Path) -> None:
    from tightfit.train.data.samples import prepare
    from tightfit.types import ConfigError

    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"the cache .* cannot be written .*: name another with XDG_CACHE_HOME"):
        prepare(DataSpec(path="shipped:text"), bytes_tokenizer, tmp_path / "file" / "cache", lambda *_: None)


@pytest.mark.slow
def test_several_processes_make_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "big.jsonl"
    stories = (SHIPPED / "stories.txt").read_text(encoding="utf-8").split("\n\n")
    with data.open("w", encoding="utf-8") as file:
        for number in range(18_000):
            file.write(json.dumps({"instruction": f"Story {number}", "output": stories[number % 150]}) + "\n")
    assert data.stat().st_size > 9 * 2**20
    folders = []
    for cores in ({0}, os.sched_getaffinity(0)):
        cache = tmp_path / "cache"
        done = builder(tmp_path, data, preexec_fn=lambda cores=cores: os.sched_setaffinity(0, cores))
        out, error = done.communicate(timeout=300)
        assert done.returncode == 0, error
        assert out.count("tokenising") == 4
        folders.append({path.name: path.read_bytes() for path in cache.glob("*/*") if path.is_file()})
        cache.rename(tmp_path / f"cache{len(folders)}")
    assert folders[0] == folders[1]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> int:
    """As large as a piece, and as what processes are started for, is in this test."""
    monkeypatch.setattr("tightfit.train.data.cache.PIECE_BYTES", 2**16)
    monkeypatch.setattr("tightfit.train.data.cache.ALONE_BYTES", 2**16)
    return 2**16


@pytest.mark.thorough
def test_line_numbers_hold_over_pieces(built: Built, bytes_tokenizer: Any, tmp_path: Path, small_pieces: int) -> None:
    path = tmp_path / "big.jsonl"
    good = json.dumps({"text": "x" * 1000}) + "\n"
    path.write_text(good * 100 + "{\n" + good * 50, encoding="utf-8")
    assert len(good) * 100 > small_pieces
    with pytest.raises(ConfigError, match=r"line 101 of .*big\.jsonl is not JSON"):
        built(DataSpec(path=str(path), sequence=2048), bytes_tokenizer)


@pytest.mark.thorough
def test_a_text_over_many_pieces_is_one_document(
    built: Built, bytes_tokenizer: Any, tmp_path: Path, small_pieces: int
) -> None:
    path = big_text(tmp_path / "big.txt", 0)
    assert path.stat().st_size > small_pieces
    train = built(DataSpec(path=str(path), sequence=1000), bytes_tokenizer).train
    text = path.read_bytes()
    assert int(np.sum(train.lengths)) == len(text) + 1
    assert set(train.lengths[:-1].tolist()) == {1000}
    at = small_pieces // 1000  # the sample over the border of two pieces
    assert bytes_tokenizer.decode(train[at].ids) == text[at * 1000 : (at + 1) * 1000].decode(errors="replace")


@pytest.mark.slow
def test_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    """Every process of the build may hold no more than 16 MB over what a quarter of the data takes."""
    peaks = []
    for megabytes in (16, 64):
        data = big_text(tmp_path / f"{megabytes}.txt", megabytes)
        script = tmp_path / "measured.py"
        measure = "    import resource\n    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)\n"
        measure += '    print("peak", *(resource.getrusage(each).ru_maxrss for each in who))\n'
        script.write_text(BUILD.replace("\nif __name__", f"{measure}\nif __name__"), encoding="utf-8")
        words = [sys.executable, str(script), str(data), str(tmp_path / "cache")]
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
        peaks.append([int(word) for word in done.stdout.split("peak ")[1].split()])
        data.unlink()
    (small, small_child), (large, large_child) = peaks
    assert large - small < 16 * 1024, peaks
    assert large_child - small_child < 16 * 1024, peaks


@pytest.mark.slow
@pytest.mark.thorough
def test_a_killed_build_leaves_nothing_that_looks_finished(tmp_path: Path) -> None:
    data = big_text(tmp_path / "big.txt", 14)
    first = builder(tmp_path, data, start_new_session=True)
    assert first.stdout is not None
    assert first.stdout.readline().startswith("0 ")
    assert int(first.stdout.readline().split()[0]) > 2**22  # the first piece is done
    children = [int(word) for word in Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()]
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    cache = tmp_path / "cache"
    assert not list(cache.glob("*/manifest.json"))
    assert len(children) >= 2
    for _ in range(100):
        if not any(Path(f"/proc/{child}").exists() for child in children):
            break
        time.sleep(0.1)
    else:
        pytest.fail("processes outlived the build")
    again = builder(tmp_path, data)
    out, error = again.communicate(timeout=300)
    assert again.returncode == 0, error
    assert "built " in out
    assert not list(cache.glob(".building-*"))


@pytest.mark.thorough
def test_two_builders_do_the_work_once(tmp_path: Path) -> None:
    data = big_text(tmp_path / "big.txt", 0)
    words = (str(data), str(tmp_path / "cache"))
    both = [warm_desk.Process(*words, ranks=True, code=BUILD) for _ in range(2)]
    outs = [each.communicate(timeout=300) for each in both]
    for each in both:
        each.kill()
    assert [each.returncode for each in both] == [0, 0], outs
    assert sorted("tokenising" in out for out, _ in outs) == [False, True]
    assert len({out.splitlines()[-1] for out, _ in outs}) == 1


@pytest.mark.thorough
def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    """A limit on file sizes stands in for the disk: both fail in the middle of a write."""
    data = big_text(tmp_path / "big.txt", 1)
    limit = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    limit += f"resource.setrlimit(resource.RLIMIT_FSIZE, ({2**20}, {2**20}))\n"
    done = warm_desk.python(limit + BUILD, str(data), str(tmp_path / "cache"), ranks=True)
    assert done.returncode != 0
    assert "is full or has a limit on file sizes" in done.stderr
    assert not list((tmp_path / "cache").glob("*/manifest.json"))


def test_somebodys_files_in_the_cache_stay(tmp_path: Path) -> None:
    """A folder that is called as ours would be."""
    folder = tmp_path / ("a" * 32)
    left = tmp_path / f".building-{folder.name}-999999999"  # a process that is not there
    for place in (folder, left):
        place.mkdir()
        (place / "tokens.bin").write_bytes(b"tokens")
        (place / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match=r"thesis\.tex was not written by tightfit"), stage(folder) as staging:
        (staging / "tokens.bin").write_bytes(b"new")
    for place in (folder, left):
        assert sorted(path.name for path in place.iterdir()) == ["thesis.tex", "tokens.bin"]
        (place / "thesis.tex").unlink()
    with stage(folder) as staging:
        (staging / "tokens.bin").write_bytes(b"new")
    assert (folder / "tokens.bin").read_bytes() == b"new"
    assert not left.exists()
