"""Checkpoints on disk: a whole one is known as whole, and whatever happens to it is seen."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from stored import MOMENTS, WEIGHTS, flip, left_behind, store, stored_file

from tightfit.inputs import records
from tightfit.owned import Listed, NotOurs, Ours
from tightfit.runs import checkpoints, disk
from tightfit.runs.checkpoints import (
    MANIFEST,
    STATE,
    Keeping,
    Manifest,
    Span,
    StoredFile,
    Torn,
    Unknown,
    checked,
    inventory,
    newest_first,
    orphans,
    outdated,
    read_manifest,
    read_state,
    remove,
    remove_orphan,
    spans_of,
    surplus,
    verify,
    written_first,
)

EMPTY, NO_BYTES_NEEDED = "merges.txt", ("delete", "longer")
FILES = (WEIGHTS, MOMENTS, STATE, MANIFEST, EMPTY)


def wholly_verified(folder: Path) -> None:
    verify(folder, spans_of(checked(folder)))


def names(folders: list[Path]) -> list[str]:
    return [folder.name for folder in folders]


# --- the manifest -------------------------------------------------------------------------------


def test_a_whole_one_is_whole(tmp_path: Path) -> None:
    folder = store(tmp_path, 500)
    manifest = checked(folder)
    assert (manifest.step, folder.name) == (500, "step-00000500")
    assert set(manifest.files) == {*FILES} - {MANIFEST}
    assert manifest.bytes == sum((folder / name).stat().st_size for name in manifest.files)
    heard: list[int] = []
    verify(folder, spans_of(manifest), heard.append)
    assert sum(heard) == manifest.bytes
    assert read_manifest(folder) == manifest


def test_a_manifest_comes_back_as_it_was_written(tmp_path: Path) -> None:
    files = {"ä b": StoredFile(7, (Span(0, 3, "x"), Span(3, 7, "y"))), "a/b/c": StoredFile(0, ())}
    manifest = Manifest(step=123456789, written="now", files=files)
    (tmp_path / MANIFEST).write_text(manifest.text(), encoding="utf-8")
    assert read_manifest(tmp_path) == manifest


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is no JSON"),
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[]", "was changed"),
        ("{}", "was changed"),
        ("null", "was changed"),
        ('{"schema": 1, "step": 5, "files": {}, "itself": "0"}', "was changed"),
    ],
)
def test_a_manifest_of_anything(tmp_path: Path, text: str, why: str) -> None:
    folder = store(tmp_path, 5)
    (folder / MANIFEST).write_text(text)
    with pytest.raises(Torn, match=why):
        read_manifest(folder)


def test_a_manifest_that_is_no_text(tmp_path: Path) -> None:
    folder = store(tmp_path, 5)
    (folder / MANIFEST).write_bytes(b"\xff\xfe{}")
    with pytest.raises(Torn, match="is no JSON"):
        read_manifest(folder)


@pytest.mark.thorough
def test_any_flipped_bit_of_a_manifest_is_seen_or_means_the_same(tmp_path: Path) -> None:
    folder = store(tmp_path, 5)
    path, before = folder / MANIFEST, read_manifest(folder)
    whole, seen = path.read_bytes(), 0
    for place in range(0, len(whole), 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :])
        try:
            assert read_manifest(folder) == before  # a blank between two words has become another
        except Torn:
            seen += 1
    assert seen > len(whole) // 6


def test_another_schema_is_a_newer_versions_and_not_torn(tmp_path: Path) -> None:
    folder = store(tmp_path, 5)
    tree = json.loads((folder / MANIFEST).read_text())
    del tree["itself"]
    tree["schema"] = 9
    (folder / MANIFEST).write_text(json.dumps({**tree, "itself": checkpoints._own_digest(tree)}))
    with pytest.raises(Unknown, match="its schema is 9, and this version reads 1 and 2"):
        checked(folder)


def test_a_manifest_that_cannot_be_read_now_proves_nothing(tmp_path: Path) -> None:
    folder = store(tmp_path, 5)
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).mkdir()
    with pytest.raises(Unknown, match=r"cannot be read \(is a directory\)"):
        checked(folder)


# --- damage -------------------------------------------------------------------------------------


HARMS = [(name, harm) for name in FILES for harm in ("truncate", "flip", "delete", "empty", "longer")]


@pytest.mark.parametrize(("name", "harm"), [each for each in HARMS if each[0] != EMPTY or each[1] in NO_BYTES_NEEDED])
def test_whatever_happens_to_a_file_is_seen(tmp_path: Path, name: str, harm: str) -> None:
    folder = store(tmp_path, 500)
    path = folder / name
    size = path.stat().st_size
    if harm == "delete":
        path.unlink()
    elif harm == "flip":
        flip(path, size // 2)
    elif harm == "longer":
        path.write_bytes(path.read_bytes() + b"x")
    else:
        os.truncate(path, 0 if harm == "empty" else size - 1)
    if harm == "truncate" and name == MANIFEST:  # the line's end says nothing
        wholly_verified(folder)
        os.truncate(path, size - 2)
    with pytest.raises(Torn) as found:
        wholly_verified(folder)
    assert name in str(found.value)


def test_a_flipped_bit_is_named_with_its_place(tmp_path: Path) -> None:
    folder = store(tmp_path, 500, size=3000)
    flip(folder / WEIGHTS, 1500)
    checked(folder)
    with pytest.raises(Torn, match=r"model.safetensors is damaged between bytes 1,000 and 2,000"):
        wholly_verified(folder)


def test_bytes_without_a_hash_are_not_trusted(tmp_path: Path) -> None:
    folder = store(tmp_path, 5)
    data = (folder / WEIGHTS).read_bytes()
    whole = stored_file(data, 4)
    for spans in (whole.spans[1:], whole.spans[:-1], whole.spans[:1] + whole.spans[2:], ()):
        files = {**checked_files(folder), WEIGHTS: StoredFile(len(data), spans)}
        (folder / MANIFEST).write_text(Manifest(step=5, written="now", files=files).text())
        with pytest.raises(Torn, match=r"no hash for a part of model\.safetensors"):
            checked(folder)


def checked_files(folder: Path) -> dict[str, StoredFile]:
    return dict(read_manifest(folder).files)


def test_pieces_may_stand_in_any_order_and_overlap(tmp_path: Path) -> None:
    folder = store(tmp_path, 5)
    data = (folder / WEIGHTS).read_bytes()
    spans = (*reversed(stored_file(data, 4).spans), Span(0, len(data), checkpoints.digest(data)))
    files = {**checked_files(folder), WEIGHTS: StoredFile(len(data), spans)}
    (folder / MANIFEST).write_text(Manifest(step=5, written="now", files=files).text())
    assert checked(folder).files[WEIGHTS].spans == spans
    wholly_verified(folder)


def test_a_folder_under_another_name_is_not_believed(tmp_path: Path) -> None:
    folder = store(tmp_path, 500)
    other = folder.rename(folder.with_name("step-00000700"))
    with pytest.raises(Torn, match="it is of step 500, which its name does not say"):
        checked(other)


# --- which there are ----------------------------------------------------------------------------


def test_the_newest_come_first_and_other_things_are_left_alone(tmp_path: Path) -> None:
    for step in (9, 100_000_000, 500):
        store(tmp_path, step)
    left_behind(tmp_path, ".step-00000600.partial")
    (tmp_path / "checkpoints" / "step-7").mkdir()
    (tmp_path / "checkpoints" / "notes.txt").write_text("mine")
    (tmp_path / "checkpoints" / "step-00000800").write_text("a file")
    assert names(newest_first(tmp_path)) == ["step-100000000", "step-00000500", "step-00000009"]
    assert newest_first(tmp_path / "nowhere") == []


def test_the_newest_that_was_finished(tmp_path: Path) -> None:
    assert written_first(tmp_path) is None
    store(tmp_path, 1)
    (store(tmp_path, 2) / MANIFEST).unlink()
    assert written_first(tmp_path) == tmp_path / "checkpoints" / "step-00000001"


def test_torn_ones_are_named_and_do_not_count_among_the_newest(tmp_path: Path) -> None:
    for step in (100, 200, 300, 400):
        store(tmp_path, step)
    os.truncate(tmp_path / "checkpoints" / "step-00000400" / WEIGHTS, 10)
    with pytest.raises(Torn, match="10 bytes instead of 4,096"):
        checked(tmp_path / "checkpoints" / "step-00000400")
    assert names(outdated(tmp_path, Keeping(last=2), 400)) == ["step-00000100"]


def test_later_ones_that_were_passed_over_never_displace_the_new_one(tmp_path: Path) -> None:
    """Their sizes may be right and their bytes not."""
    for step in (900, 950, 1000):
        store(tmp_path, step)
    assert names(outdated(tmp_path, Keeping(last=1), 950)) == ["step-00000900"]


def test_a_state_that_cannot_be_read_now_is_not_torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = store(tmp_path, 1)

    def unreadable(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(records, "open_regular", unreadable)
    with pytest.raises(Unknown, match="cannot be read"):
        read_state(folder)


@pytest.mark.parametrize(
    ("keeping", "gone"),
    [
        (Keeping(last=1), {100, 200, 300, 400}),
        (Keeping(last=2), {100, 200, 300}),
        (Keeping(last=9), set()),
        (Keeping(last=1, every_steps=200), {100, 300}),
        (Keeping(last=3, every_steps=200), {100}),
        (Keeping(last=1, every_steps=7), {100, 200, 300, 400}),
    ],
)
def test_which_need_not_stay(keeping: Keeping, gone: set[int]) -> None:
    assert surplus([300, 100, 500, 200, 400], keeping) == gone


def test_a_checkpoint_goes_out_of_sight_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = store(tmp_path, 100)

    def killed(path: Path, names: Ours, *, last: str = "") -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(disk, "remove_folder", killed)
        with pytest.raises(KeyboardInterrupt):
            remove(folder)
    assert newest_first(tmp_path) == []
    assert names(orphans(tmp_path)) == [".step-00000100.gone"]
    remove(store(tmp_path, 100))
    assert os.listdir(tmp_path / "checkpoints") == []


def test_orphans_are_found_and_removed(tmp_path: Path) -> None:
    store(tmp_path, 100)
    for name in (".step-00000200.partial", ".step-00000100.old", ".step-00000050.gone"):
        left_behind(tmp_path, name)
    (tmp_path / "checkpoints" / ".hidden").mkdir()
    for path in orphans(tmp_path):
        remove_orphan(path)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == [".hidden", "step-00000100"]


def test_a_file_by_the_name_of_an_orphan_is_somebodys(tmp_path: Path) -> None:
    store(tmp_path, 100)
    other = tmp_path / "checkpoints" / ".step-00000300.partial"
    other.write_text("a file")
    with pytest.raises(NotOurs, match=r"step-00000300\.partial"):
        remove_orphan(other)
    assert other.read_text() == "a file"


# --- the disk -----------------------------------------------------------------------------------


def test_files_are_made_whole(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    disk.make_folder(path.parent)
    made = disk.create(path, 10)
    disk.put(made, memoryview(b"world"), 5)
    disk.put(made, memoryview(b"hello"), 0)
    disk.sync(made)
    os.close(made)
    disk.sync_path(path.parent)
    assert path.read_bytes() == b"helloworld"
    with pytest.raises(FileExistsError):
        disk.create(path, 1)
    disk.write_text(tmp_path / "t", "ä\n")
    assert (tmp_path / "t").read_text(encoding="utf-8") == "ä\n"
    disk.rename(path, tmp_path / "c")
    disk.remove_file(tmp_path / "c")
    disk.remove_folder(tmp_path / "a", Listed(()))
    assert os.listdir(tmp_path) == ["t"]


def test_a_file_that_has_no_room_is_refused_before_it_is_written(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"No space left|too large"):
        disk.create(tmp_path / "large", 1 << 60)


def test_room_is_that_of_the_place_that_will_be(tmp_path: Path) -> None:
    assert disk.room(tmp_path / "not" / "yet") > 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"step": -5}, "says step -5, and its name 100"),
        ({"step": 1_000_000_000}, "says step 1000000000, and its name 100"),
        ({"step": "100"}, "says step '100'"),
        ({"step": True}, "says step True"),
        ({"step": float("nan")}, "cannot be read"),
        ({"epoch": float("inf")}, "cannot be read"),
        ({"epoch": -1.0}, "says epoch -1.0"),
        ({"samples": -1}, "says samples -1"),
        ({"samples": 7, "job": {"effective_batch": 4}}, "says 7 samples, and 100 steps of 4 are 400"),
        ({"optimizer": {"steps": 101}}, "says optimizer.steps 101 at step 100"),
        ({"optimizer": {"steps": "many"}}, "says optimizer.steps 'many'"),
    ],
)
def test_a_state_that_contradicts_itself_is_no_checkpoint(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    """Whoever wrote it gave it a right hash as well."""
    folder = store(tmp_path, 100)
    state = {**json.loads((folder / STATE).read_text()), "samples": 400, "optimizer": {"steps": 99}, **changes}
    (folder / STATE).write_text(json.dumps(state))
    with pytest.raises(Torn, match=re.escape(said)):
        read_state(folder)
    assert inventory(tmp_path).checkpoints[0].problem is not None


def test_a_state_that_agrees_is_read(tmp_path: Path) -> None:
    folder = store(tmp_path, 100)
    state = {"step": 100, "samples": 400, "epoch": 0.25, "optimizer": {"steps": 98}, "job": {"effective_batch": 4}}
    (folder / STATE).write_text(json.dumps(state))
    assert read_state(folder) == state
