"""From a folder or an id to a folder with weights, without a network."""

from __future__ import annotations

import json
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tightfit.train.sources_hub import find_weights
from tightfit.types import ModelError

COMMIT = "a" * 40


def cached(home: Path, name: str, files: tuple[str, ...]) -> Path:
    """The layout of the Hugging Face cache, as a download leaves it."""
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    folder = repository / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    for file in files:
        (folder / file).write_text("{}", encoding="utf-8")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    return folder


SCRIPT = """
import sys
from tightfit.train.sources_hub import find_weights
from tightfit.types import ModelError
for source in sys.argv[1:]:
    told = []
    try:
        folder = find_weights(source, progress=lambda *event: told.append(event))
        print('found', folder, *(f'told {what} {done} of {total}' for what, done, total in told[-1:]))
    except ModelError as error:
        print('error', error)
"""


def asked(*sources: str, **environment: str) -> list[tuple[str, str]]:
    """Answers or errors, of a process of its own: huggingface_hub reads its environment when it is loaded."""
    plain = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *sources], capture_output=True, text=True, env=plain | environment, check=True
    )
    said = done.stdout.splitlines()
    assert len(said) == len(sources)
    return [(kind, text) for kind, _, text in (line.partition(" ") for line in said)]


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert find_weights(str(tmp_path)) == tmp_path


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no folder"):
        find_weights(str(tmp_path / "nothing"))


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="is a file: give the folder"):
        find_weights(str(tmp_path / "model.safetensors"))


@pytest.mark.thorough
def test_what_the_cache_answers_without_a_network(tmp_path: Path) -> None:
    whole = cached(tmp_path, "whole/model", ("config.json", "model.safetensors", "tokenizer.json"))
    cached(tmp_path, "config/alone", ("config.json",))
    folder = cached(tmp_path, "lacks/shard", ("config.json", "model-00001-of-00002.safetensors"))
    index = '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    sources = ("whole/model", "config/alone", "lacks/shard", "not an id!", "modelscope:some/model")
    found, alone, lacks, no_id, no_modelscope = asked(*sources, HF_HOME=str(tmp_path))
    assert found == ("found", str(whole))
    assert (alone[0], "not in the Hugging Face cache" in alone[1]) == ("error", True)
    assert lacks[0] == "error"
    assert (no_id[0], "is no folder and no Hugging Face id" in no_id[1]) == ("error", True)
    assert (no_modelscope[0], "pip install modelscope" in no_modelscope[1]) == ("error", True)


@pytest.mark.thorough
def test_no_network_is_one_sentence(tmp_path: Path) -> None:
    ((kind, text),) = asked("some/model", HF_HOME=str(tmp_path), HF_HUB_OFFLINE="0", HF_ENDPOINT="http://127.0.0.1:9")
    assert kind == "error"
    assert "could not be fetched from Hugging Face" in text


MODELSCOPE = """
def snapshot_download(model_id, allow_patterns=None):
    if model_id != "some/model":
        raise ValueError("no such model")
    assert "*.safetensors" in allow_patterns and "*.bin" not in allow_patterns
    return {folder!r}
"""


@pytest.mark.thorough
def test_modelscope_is_asked_where_hugging_face_has_no_answer(tmp_path: Path) -> None:
    # The package is not among what is installed for tests: this one has its one function.
    (tmp_path / "modelscope.py").write_text(MODELSCOPE.format(folder=str(tmp_path)), encoding="utf-8")
    sources = ("modelscope:some/model", "some/model", "other/model")
    by_name, without, (kind, text) = asked(*sources, HF_HOME=str(tmp_path), PYTHONPATH=str(tmp_path))
    assert by_name == without == ("found", str(tmp_path))
    assert kind == "error"
    assert "could not be fetched from ModelScope (no such model; Hugging Face:" in text


FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": bytes(200_000),
    "tokenizer.json": b"{}",
    "pytorch_model.bin": b"a pickle",
}


class Mirror(BaseHTTPRequestHandler):
    """As much of a Hugging Face server as a download asks for."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        name = path.rpartition("/")[2]
        if path.startswith("/api/models/some/model/tree"):
            listed = [{"type": "file", "path": file, "size": len(data), "oid": file} for file, data in FILES.items()]
            data = json.dumps(listed).encode()
        elif path.startswith("/api/models/some/model"):
            siblings = [{"rfilename": file} for file in FILES]
            data = json.dumps({"id": "some/model", "sha": COMMIT, "siblings": siblings}).encode()
        elif path.startswith("/some/model/resolve/") and name in FILES:
            data = FILES[name]
        else:
            self.send_error(404)
            return
        self.send_response(200)
        for key, value in (("ETag", f'"{name}"'), ("X-Repo-Commit", COMMIT), ("Content-Length", str(len(data)))):
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.mark.thorough
def test_a_mirror_is_fetched_from_and_tells_how_far_it_is(tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Mirror)
    Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        online = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1"}
        (kind, text), (missing, _) = asked("some/model", "some/missing", **online)
        assert (kind, missing) == ("found", "error")
    finally:
        server.shutdown()
        server.server_close()
    folder = Path(text.partition(" told ")[0])
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (folder / "model.safetensors").stat().st_size == 200_000
    total = sum(len(data) for file, data in FILES.items() if not file.endswith(".bin"))
    assert text.endswith(f"told fetching some/model {total} of {total}")
    assert asked("some/model", HF_HOME=str(tmp_path)) == [("found", str(folder))]
