"""`tightfit doctor` as a user runs it: a process of its own, with stand-ins for the makers' tools on PATH."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import patience
import warm_desk

sys.path.insert(0, str(Path(__file__).parents[1] / "hardware" / "probes"))

import recorded

pytestmark = pytest.mark.thorough

MOST_S = 10
TOOLS = ("nvidia-smi", "hy-smi", "rocm-smi", "amd-smi")
CONFUSING = (
    "VISIBLE_DEVICES",
    "ALLOC_CONF",
    "NCCL_",
    "GLOO_",
    "CUDA_",
    "TORCH_",
    "RANK",
    "WORLD_SIZE",
    "MASTER_",
    "OMP_",
)


@dataclass
class Bench:
    """A folder to be in, with tools of our own before those of the machine."""

    folder: Path
    env: dict[str, str] = field(default_factory=dict)

    def tool(self, name: str, answers: list[tuple[str, str]]) -> None:
        """It prints the first answer whose key is in its command line, and fails without one."""
        self.script(
            name,
            f"#!{sys.executable} -SE\nimport sys\nline = ' '.join(sys.argv[1:])\n"
            f"for key, text in {answers!r}:\n"
            "    if key in line:\n        sys.stdout.write(text)\n        sys.exit(0)\n"
            "sys.exit('not known')\n",
        )

    def script(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def doctor(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return warm_desk.run("doctor", *words, cwd=self.folder, env=self.env | env)

    def tree(self, *words: str, **env: str) -> dict[str, Any]:
        done = self.doctor(*words, "--json", **env)
        assert done.stderr == ""
        tree: dict[str, Any] = json.loads(done.stdout)
        assert done.returncode == (1 if tree["verdict"] == "red" else 0)
        return tree

    def rows(self, *words: str, **env: str) -> dict[str, dict[str, Any]]:
        return {row["id"]: row for row in self.tree(*words, **env)["rows"]}


NO_DISK = ("--output", "/proc/self/runs")
"""Where nothing can be written there is no speed to measure, which takes most of a second."""


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Nothing is on PATH but what a test puts there, so that cards of the machine itself stay out of sight."""
    env = {name: value for name, value in os.environ.items() if not any(word in name for word in CONFUSING)}
    env |= {"PATH": str(tmp_path / "bin"), "PYTHONPATH": str(tmp_path / "bin"), "COLUMNS": "100"}
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "pynvml.py").write_text("raise ImportError\n")
    return Bench(tmp_path, env)


def h200s(bench: Bench) -> None:
    rows = "".join(recorded.NVIDIA_ROWS.splitlines(keepends=True)[:2])
    short = "".join(f"{i}, {recorded.UUID}{i}, 143771, 9.0, NVIDIA H200\n" for i in range(2))
    bench.tool(
        "nvidia-smi",
        [
            ("--query-gpu=index,pci", rows),
            ("--query-gpu=index,uuid", short),
            ("--query-compute", recorded.NVIDIA_APPS.replace("4711", str(os.getpid()))),
            ("topo", recorded.NVIDIA_TOPO),
            ("", recorded.NVIDIA_HEAD),
        ],
    )


# --- this machine -------------------------------------------------------------------------------


def test_this_machine_in_seconds(bench: Bench) -> None:
    begun = patience.now()
    done = bench.doctor(PATH=os.environ["PATH"], PYTHONPATH="")
    assert patience.now() - begun < MOST_S
    assert done.returncode in (0, 1)
    assert done.stderr == ""
    for title in ("GPUs", "host", "disk", "software", "building", "environment"):
        assert f"{title}\n" in done.stdout
    assert "pinned buffers" in done.stdout
    assert [path.name for path in bench.folder.iterdir()] == ["bin"], "nothing is left behind"


def test_json(bench: Bench) -> None:
    tree = bench.tree()
    assert set(tree) >= {"verdict", "lights", "rows", "cards", "driver", "torch", "packages", "seconds"}
    assert sum(tree["lights"].values()) == len(tree["rows"])
    assert all(set(row) == {"id", "group", "light", "what", "fix", "commands"} for row in tree["rows"])
    assert all(row["fix"] for row in tree["rows"] if row["light"] == "red" and row["group"] != "job")


def test_torch_is_never_imported(bench: Bench) -> None:
    script = (
        "import sys\nfrom tightfit.cli import main\nmain(['doctor', '--json'])\n"
        "sys.exit(sum(name in sys.modules for name in ('torch', 'transformers', 'deepspeed', 'rich')))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], env=bench.env, capture_output=True, check=False)
    assert done.returncode == 0


@pytest.mark.thorough
def test_where_only_the_desk_is_installed(bench: Bench) -> None:
    """A search path with the desk's own dependencies and nothing else."""
    site = bench.folder / "site"
    site.mkdir()
    desk = "annotated_types pydantic pydantic_core typing_extensions typing_inspection yaml _yaml hjson rich pygments"
    for name in [*desk.split(), "markdown_it", "mdurl", "xxhash", "huggingface_hub", "packaging", "tightfit"]:
        spec = find_spec(name)
        if spec is not None and spec.origin is not None:
            origin = Path(spec.origin)
            origin = origin.parent if origin.name.startswith("__init__") else origin
            (site / origin.name).symlink_to(origin)
    command = [sys.executable, "-S", "-m", "tightfit", "doctor"]
    env = bench.env | {"PYTHONPATH": str(site)}
    done = subprocess.run(command, cwd=bench.folder, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "planning works, training not" in done.stdout
    assert "pip install 'tightfit[train]'" in done.stdout


@pytest.mark.thorough
def test_tools_that_hang_are_left_behind_and_a_job_does_not_wait_for_them_again(bench: Bench) -> None:
    """Each has a child that keeps its pipes open, as a driver's tools have."""
    for name in TOOLS:
        bench.script(name, f"#!/bin/sh\nexec 2>&1\necho $$ >> {bench.folder}/pids\n/bin/sleep 300 &\n/bin/sleep 300\n")
    (bench.folder / "job.yaml").write_text("model: tiny_llama\n")
    begun = patience.now()
    found = bench.rows("job.yaml", *NO_DISK)
    assert patience.now() - begun < MOST_S
    assert found["gpu-tool"]["light"] == "red"
    assert "did not answer" in found["gpu-tool"]["what"]
    for pid in (bench.folder / "pids").read_text().split():
        assert not Path("/proc", pid, "cmdline").exists() or not Path("/proc", pid, "cmdline").read_bytes()


# --- machines that are not here -----------------------------------------------------------------


@pytest.mark.thorough
def test_two_h200s_of_nvidia(bench: Bench) -> None:
    h200s(bench)
    tree = bench.tree(*NO_DISK)
    found = {row["id"]: row for row in tree["rows"]}
    assert [card["pci"] for card in tree["cards"]] == ["0000:1b:00.0", "0000:43:00.0"]
    assert tree["driver"] == {"version": "570.124.06", "runtime": "12.8"}
    ours = tree["cards"][1]["processes"][0]
    assert (ours["pid"], ours["held_bytes"]) == (os.getpid(), 119500 * 2**20)
    assert ours["user"]
    assert "py" in ours["command"]
    assert found["gpu-0"]["light"] == "green"
    assert found["gpu-1"]["light"] == "yellow"
    assert "not to be seen from here" in found["gpu-1"]["what"]
    assert "NVLink" in found["links"]["what"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("answer", "total"),
    [
        (recorded.HY_JSON, 65520 * 2**20),
        pytest.param(recorded.HY_NO_COMMAS, 65520 * 2**20, marks=pytest.mark.slow),
        pytest.param(recorded.HY_TEXT, 65520 * 2**20, marks=pytest.mark.slow),
        pytest.param(recorded.HY_CSV, 65520 * 2**20, marks=pytest.mark.slow),
        (recorded.HY_TABLE, None),
    ],
)
def test_hygon_in_every_shape(bench: Bench, answer: str, total: int | None) -> None:
    bench.tool("hy-smi", [("--showpids", recorded.HY_PIDS), ("--showtopotype", ""), ("", answer)])
    bench.tool("rocm-smi", [("", answer)])
    cards = bench.tree(*NO_DISK)["cards"]
    assert cards[0]["vendor"] == "hygon"
    assert cards[0]["total_bytes"] == total
    assert len({card["index"] for card in cards}) == len(cards), "both tools list the same cards"


def test_amd_by_its_newer_tool(bench: Bench) -> None:
    answers = [("metric", recorded.AMD_LIST), ("static", recorded.AMD_STATIC), ("process", recorded.AMD_PROCESS)]
    bench.tool("amd-smi", answers)
    tree = bench.tree(*NO_DISK)
    assert tree["cards"][0]["total_bytes"] == 196592 * 2**20
    assert tree["cards"][1]["used_bytes"] is None, "unknown is not zero"


def test_an_old_driver_refuses_a_field(bench: Bench) -> None:
    """nvidia-smi refuses a whole question for one field that it does not know."""
    line = recorded.NVIDIA_ROWS.splitlines()[0].replace(" 9.0,", "")
    bench.script(
        "nvidia-smi",
        f"#!{sys.executable} -SE\nimport sys\nline = ' '.join(sys.argv[1:])\n"
        "if 'compute_cap' in line:\n"
        "    print('Field \"compute_cap\" is not a valid field to query.')\n    sys.exit(2)\n"
        f"print({line!r} if '--query-gpu' in line else '')\n",
    )
    (card,) = bench.tree(*NO_DISK)["cards"]
    assert (card["name"], card["arch"], card["total_bytes"]) == ("NVIDIA H200", None, 143771 * 2**20)


def test_a_broken_driver_is_red(bench: Bench) -> None:
    bench.script(
        "nvidia-smi", "#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n"
    )
    found = bench.rows(*NO_DISK)
    assert found["gpu-tool"]["light"] == "red"
    assert "Driver/library version mismatch" in found["gpu-tool"]["what"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "text",
    ["0, 1\n", *(pytest.param(t, marks=pytest.mark.slow) for t in ("", "\x00\x01", "{", "[[[[", "card0\n" * 50))],
)
def test_tools_that_talk_nonsense(bench: Bench, text: str) -> None:
    for name in TOOLS:
        bench.tool(name, [("", text)])
    assert bench.tree(*NO_DISK)["cards"] == []


def test_torch_is_asked_in_a_process_of_its_own(bench: Bench) -> None:
    """A package that answers as torch does, where no maker's tool shows a card."""
    place = bench.folder / "bin" / "torch"
    place.mkdir()
    (place / "__init__.py").write_text(
        "class version: hip = None\n"
        "class cuda:\n"
        "    is_available = staticmethod(lambda: True)\n"
        "    device_count = staticmethod(lambda: 1)\n"
        "    mem_get_info = staticmethod(lambda index: (4096, 8192))\n"
        "    @staticmethod\n"
        "    def get_device_properties(index):\n"
        "        class known: name, total_memory, major, minor = 'NVIDIA H200', 8192, 9, 0\n"
        "        return known\n"
    )
    script = (
        "import sys, time\nfrom tightfit.hardware.probes import probe_cards\n"
        "found = probe_cards(ask_torch_until=time.monotonic() + 20)\n"
        "assert 'torch' not in sys.modules\n"
        "(card,) = found.cards\nprint(found.tools, card.total_bytes, card.free_bytes, card.used_bytes, card.arch)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], env=bench.env, capture_output=True, text=True, check=True)
    assert done.stdout == "('torch',) 8192 4096 None sm_90\n"


def test_tokens_in_other_peoples_commands_are_struck_out(bench: Bench) -> None:
    secret = "hf_" + "a1B2" * 8
    with subprocess.Popen([sys.executable, "-c", "input()", secret], stdin=subprocess.PIPE) as process:
        rows = recorded.NVIDIA_ROWS.splitlines(keepends=True)[1]
        apps = f"{recorded.UUID}1, {process.pid}, 7\n"
        bench.tool("nvidia-smi", [("--query-gpu=index,pci", rows), ("--query-compute", apps), ("", "")])
        shown, told = bench.doctor(*NO_DISK).stdout, bench.doctor(*NO_DISK, "--json").stdout
        process.communicate()
    assert str(process.pid) in shown
    assert secret[:20] not in shown + told


# --- a job --------------------------------------------------------------------------------------


def job(bench: Bench, text: str) -> str:
    (bench.folder / "job.yaml").write_text(text)
    return "job.yaml"


def test_a_job_that_can_start(bench: Bench) -> None:
    (bench.folder / "data.jsonl").write_text('{"text": "a"}\n')
    found = bench.rows(job(bench, "model: tiny_llama\ndata: {path: ./data.jsonl}\nhardware: {gpus: 1x24GB}\n"))
    assert found["plan"]["light"] == "green"
    assert "named by the job" in found["plan"]["what"]
    assert "1 file" in found["data"]["what"]
    assert found["checkpoints"]["light"] == "green"
    assert not (bench.folder / "output").exists()


@pytest.mark.thorough
def test_a_job_that_does_not_fit(bench: Bench) -> None:
    text = "model: llama-3.1-8b\neffective_batch: 1\nhardware: {gpus: 1x8GB, host_ram: 16GB}\n"
    found = bench.rows(job(bench, text), *NO_DISK)
    assert found["plan"]["light"] == "red"
    assert found["plan"]["fix"]


def test_data_that_is_not_there(bench: Bench) -> None:
    text = "model: tiny_llama\ndata: {path: ./none.jsonl}\nhardware: {gpus: 1x24GB}\n"
    assert bench.rows(job(bench, text), *NO_DISK)["data"]["light"] == "red"
    (bench.folder / "none.jsonl").write_text("")
    assert "is empty" in bench.rows("job.yaml", *NO_DISK)["data"]["what"]


def test_checkpoints_that_the_disk_has_no_room_for(bench: Bench) -> None:
    text = "model: gemma-3-27b\nhardware: {gpus: 64xH200, host_ram: 2TB}\nsaving: {keep_last: 500}\n"
    found = bench.rows(job(bench, text))["checkpoints"]
    assert found["light"] in ("yellow", "red")
    assert "a checkpoint takes about" in found["what"]


def test_room_on_the_cards_now(bench: Bench) -> None:
    h200s(bench)
    found = bench.rows(job(bench, "model: tiny_llama\n"), *NO_DISK)
    assert found["room-now"]["light"] == "green"


def test_a_card_whose_size_nobody_says(bench: Bench) -> None:
    """A plan needs a size; the check-up is shown all the same."""
    bench.tool("hy-smi", [("", recorded.HY_TABLE)])
    found = bench.rows(job(bench, "model: tiny_llama\n"), *NO_DISK)
    assert found["plan"]["light"] == "red"
    assert "does not say how much memory" in found["plan"]["what"]
    assert found["gpu-0"]["light"] == "yellow"


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none.yaml"], "cannot read none.yaml"),
        (["bin"], "cannot read bin: is a directory"),
        (["noise"], "not even text"),
        (["--outptu", "x"], "did you mean --output?"),
        (["--output", "noise"], "is a file"),
        (["a", "b"], "does not know what to do with"),
        (["empty"], ""),
    ],
)
def test_mistakes_are_one_sentence(bench: Bench, words: list[str], said: str) -> None:
    (bench.folder / "noise").write_bytes(bytes(range(256)))
    (bench.folder / "empty").write_text("")
    done = bench.doctor(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_a_folder_that_may_not_be_written_to(bench: Bench) -> None:
    found = bench.rows(*NO_DISK)
    assert found["disk"]["light"] == "red"
