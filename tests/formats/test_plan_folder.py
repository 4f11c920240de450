"""Files are on disk all or not at all, and none is ever half there."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import tempfile
import textwrap
from pathlib import Path

import pytest

import warm_desk
from tightfit.formats.plan_folder import LIST, STAGING, write
from tightfit.types import ConfigError

PLAN = '{"schema": 1, "levers": {}, "predicted": {}, "saving": {}}\n'
FILES = {"worker.json": PLAN, "launch.sh": "#!/usr/bin/env bash\ntrue\n", "PLAN.md": "# ×\n"}


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return warm_desk.python(textwrap.dedent(script), *map(str, arguments))


def test_a_new_folder_holds_exactly_the_files(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    paths = write(FILES, folder, force=False)
    assert paths == [folder / name for name in FILES]
    assert contents(folder) == FILES


def test_only_scripts_can_be_run(tmp_path: Path) -> None:
    write({**FILES, "slurm.sbatch": "true\n"}, tmp_path, force=False)
    runnable = {path.name for path in tmp_path.iterdir() if path.stat().st_mode & stat.S_IXUSR}
    assert runnable == {"launch.sh", "slurm.sbatch"}
    assert not (tmp_path / "worker.json").stat().st_mode & stat.S_IWOTH


def test_what_exists_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    write({**FILES, "launch.sh": "old"}, tmp_path, force=False)
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=r"worker\.json exists: say --force"):
        write(FILES, tmp_path, force=False)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("force", [False, True])
def test_a_script_of_the_users_own_stays(tmp_path: Path, force: bool) -> None:
    (tmp_path / "launch.sh").write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"launch\.sh exists and was not written by tightfit"):
        write(FILES, tmp_path, force=force)
    assert contents(tmp_path) == {"launch.sh": "mine"}


def test_a_plan_for_another_trainer_lists_what_was_written(tmp_path: Path) -> None:
    """It has no worker.json."""
    files = {"launch.sh": "old", "llamafactory.yaml": "old"}
    assert write(files, tmp_path, force=False) == [tmp_path / name for name in files]
    write({**files, "launch.sh": "new"}, tmp_path, force=True)
    assert (tmp_path / "launch.sh").read_text() == "new"
    (tmp_path / "hostfile").write_text("mine")
    with pytest.raises(ConfigError, match=r"hostfile exists and was not written by tightfit"):
        write({**files, "hostfile": "ours"}, tmp_path, force=True)
    assert (tmp_path / "hostfile").read_text() == "mine"


def test_a_file_that_appears_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look and the rename."""
    really = os.link

    def link(source: Path, target: Path, **options: bool) -> None:
        if target.name == "launch.sh":
            target.write_text("mine", encoding="utf-8")
        really(source, target, **options)

    monkeypatch.setattr("tightfit.owned.os.link", link)
    with pytest.raises(ConfigError, match="file exists"):
        write(FILES, tmp_path, force=False)
    assert contents(tmp_path) == {"launch.sh": "mine"}


def test_force_replaces_our_names_and_no_others(tmp_path: Path) -> None:
    write({**FILES, "launch.sh": "old"}, tmp_path, force=False)
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    write(FILES, tmp_path, force=True)
    assert contents(tmp_path) == {**FILES, "notes.txt": "mine"}


def test_a_folder_is_never_two_plans(tmp_path: Path) -> None:
    """What an earlier plan for another trainer had would be read, or run, beside this one's."""
    other = {"llamafactory.yaml": "a: 1\n", "launch.sh": "true\n", "PLAN.md": "# other\n"}
    write(other, tmp_path, force=False)
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    (tmp_path / "accelerate.yaml").write_text("mine too", encoding="utf-8")
    own = {"notes.txt": "mine", "accelerate.yaml": "mine too"}
    write(FILES, tmp_path, force=True)
    assert contents(tmp_path) == {**FILES, **own}
    write(other, tmp_path, force=True)
    left = contents(tmp_path)
    assert left.pop(LIST)
    assert left == {**other, **own}
    mine = {**FILES, "slurm.sbatch": "true\n"}
    write(mine, tmp_path, force=True)
    write(other, tmp_path, force=True)
    assert "slurm.sbatch" in contents(tmp_path), "no list says that it was written"
    write(mine, tmp_path, force=True)  # but it is known as ours
    assert contents(tmp_path) == {**mine, **own}


@pytest.mark.parametrize("name", ["train.py", "dataset_info.json"])
def test_a_list_removes_no_more_than_a_plans_own(name: str, tmp_path: Path) -> None:
    write({"llamafactory.yaml": "a: 1\n", "PLAN.md": "# other\n", name: "{}"}, tmp_path, force=False)
    write(FILES, tmp_path, force=True)
    assert contents(tmp_path) == {**FILES, name: "{}"}


@pytest.mark.parametrize("force", [False, True])
def test_a_link_is_neither_replaced_nor_followed(tmp_path: Path, force: bool) -> None:
    outside, folder = tmp_path / "outside.sh", tmp_path / "plan"
    outside.write_text("mine", encoding="utf-8")
    write(FILES, folder, force=False)
    (folder / "launch.sh").unlink()
    (folder / "launch.sh").symlink_to(outside)
    with pytest.raises(ConfigError, match="exists"):
        write(FILES, folder, force=force)
    assert outside.read_text(encoding="utf-8") == "mine"
    assert (folder / "launch.sh").is_symlink()


@pytest.mark.parametrize("below", ["", "deeper", "deeper/still"])
def test_a_path_through_a_file_is_one_sentence(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        write(FILES, tmp_path / "file" / below, force=True)
    assert "\n" not in str(caught.value)
    assert contents(tmp_path) == {"file": "mine"}


def test_a_folder_where_a_file_belongs_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "worker.json").mkdir()
    with pytest.raises(ConfigError, match=r"worker\.json is a folder"):
        write(FILES, tmp_path, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["worker.json"]


@pytest.mark.parametrize("name", ["../worker.json", "a/b", "/etc/passwd", "", "..", "."])
def test_a_name_cannot_lead_out_of_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="not a file name"):
        write({name: "x"}, tmp_path / "plan", force=True)
    assert not (tmp_path / "plan").exists()


def test_a_path_that_no_disk_can_hold(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another folder"):
        write(FILES, tmp_path / "a\0b", force=False)
    with pytest.raises(ConfigError, match="name too long"):
        write(FILES, tmp_path / ("x" * 300), force=False)
    assert not any(tmp_path.iterdir())


def test_a_text_that_no_disk_can_hold_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write to"):
        write({"worker.json": "{}", "PLAN.md": "\ud800"}, tmp_path / "a" / "b", force=False)
    assert not any(tmp_path.iterdir())


def test_a_read_only_folder_is_one_sentence() -> None:
    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o555)
        done = run(
            """
            import os, sys
            from pathlib import Path
            from tightfit.formats.plan_folder import write
            from tightfit.types import ConfigError

            if os.geteuid() == 0:  # root may write anywhere
                os.setuid(65534)
            for folder in (Path(sys.argv[1]), Path(sys.argv[1]) / "plan"):
                try:
                    write({"worker.json": "{}"}, folder, force=False)
                except ConfigError as error:
                    print(error)
            """,
            place,
        )
        assert done.stdout.count("permission denied") == 2, done.stderr
        assert not any(Path(place).iterdir())


FULL = """
    import resource, signal, sys
    from pathlib import Path
    from tightfit.formats.plan_folder import write
    from tightfit.types import ConfigError

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    files = {"worker.json": "new", "b.json": "x" * 2000, "c.json": "new"}
    try:
        write(files, Path(sys.argv[1]), force=True)
    except ConfigError as error:
        print(error)
    """


def test_no_room_leaves_everything_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "worker.json").write_text(PLAN, encoding="utf-8")
    done = run(FULL, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "file too large" in done.stdout
    assert len(done.stdout.splitlines()) == 1
    assert contents(tmp_path) == {"worker.json": PLAN}


def test_no_room_in_a_new_folder_leaves_no_folder(tmp_path: Path) -> None:
    run(FULL, tmp_path / "a" / "b")
    assert not any(tmp_path.iterdir())


def test_an_error_after_what_is_stale_has_gone_brings_it_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write({"llamafactory.yaml": "a: 1\n", "PLAN.md": "# other\n"}, tmp_path, force=False)
    before, really = contents(tmp_path), os.open

    def fail(path: str | Path, flags: int, *more: int, **named: int) -> int:
        if path == tmp_path and flags == os.O_RDONLY:
            assert not (tmp_path / "llamafactory.yaml").exists()
            raise OSError(5, "Input/output error")
        return really(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(ConfigError):
        write(FILES, tmp_path, force=True)
    monkeypatch.undo()
    assert contents(tmp_path) == before


def test_an_error_between_two_renames_puts_the_old_files_back(tmp_path: Path) -> None:
    before = {**FILES, "launch.sh": "old"}
    write(before, tmp_path, force=False)
    done = run(
        """
        import os, sys
        from pathlib import Path
        from tightfit.formats.plan_folder import write

        really, names = os.replace, []

        def replace(source, target):
            if Path(target).name == "PLAN.md":
                raise OSError(30, "Read-only file system")
            really(source, target)

        os.replace = replace
        try:
            write({"worker.json": "new", "launch.sh": "new", "PLAN.md": "new"}, Path(sys.argv[1]), force=True)
        except Exception as error:
            print(type(error).__name__, error)
        """,
        tmp_path,
    )
    assert done.stdout.startswith("ConfigError cannot write to"), done.stderr
    assert contents(tmp_path) == before


@pytest.mark.parametrize("moment", range(1, 12))
def test_a_killed_process_leaves_no_half_file(tmp_path: Path, moment: int) -> None:
    """Killed before the n-th sync or rename: every file is the old one or the new one, whole."""
    old, new, names = PLAN + "\n" * 5000, PLAN + "\n" * 9000, ("worker.json", "launch.sh", "PLAN.md")
    write(dict.fromkeys(names, old), tmp_path, force=False)
    done = run(
        """
        import os, signal, sys
        from pathlib import Path
        from tightfit.formats.plan_folder import write

        left = [int(sys.argv[2])]

        def until(call):
            def counted(*arguments, **options):
                left[0] -= 1
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*arguments, **options)
            return counted

        os.fsync, os.replace, os.link = until(os.fsync), until(os.replace), until(os.link)
        write(dict.fromkeys((*sys.argv[4:], "hostfile"), sys.argv[3]), Path(sys.argv[1]), force=True)
        """,
        tmp_path,
        moment,
        new,
        *names,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    for name in names:
        assert (tmp_path / name).read_text(encoding="utf-8") in (old, new)
    last = tmp_path / "hostfile"
    assert not last.exists() or last.read_text(encoding="utf-8") == new
    write({**FILES, "hostfile": "new"}, tmp_path, force=True)
    assert not (tmp_path / STAGING).exists()
