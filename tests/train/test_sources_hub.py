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


def asked(source: str, **environment: str) -> tuple[str, str]:
    """The answer, or the error, of a process of its own: huggingface_hub reads its environment when it is loaded."""
    script = (
        "import sys\n"
        "from tightfit.train.sources_hub import find_weights\n"
        "from tightfit.types import ModelError\n"
        "told = []\n"
        "try:\n    folder = find_weights(sys.argv[1], progress=lambda *event: told.append(event))\n"
        "    last = [f'told {what} {done} of {total}' for what, done, total in told[-1:]]\n"
        "    print('found', folder, *last)\n"
        "except ModelError as error:\n    print('error', error)\n"
    )
    plain = {"PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, source], capture_output=True, text=True, env=plain | environment, check=True
    )
    kind, _, text = done.stdout.strip().partition(" ")
    assert "\n" not in text
    return kind, text


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert find_weights(str(tmp_path)) == tmp_path


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there is no folder"):
        find_weights(str(tmp_path / "nothing"))


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match="is a file: give the folder"):
        find_weights(str(tmp_path / "model.safetensors"))


def test_the_cache_answers_without_a_network(tmp_path: Path) -> None:
    folder = cached(tmp_path, "some/model", ("config.json", "model.safetensors", "tokenizer.json"))
    assert asked("some/model", HF_HOME=str(tmp_path)) == ("found", str(folder))


def test_a_cached_config_alone_is_not_enough(tmp_path: Path) -> None:
    cached(tmp_path, "some/model", ("config.json",))
    kind, text = asked("some/model", HF_HOME=str(tmp_path))
    assert kind == "error"
    assert "not in the Hugging Face cache" in text


def test_a_cached_model_that_lacks_a_shard_is_not_enough(tmp_path: Path) -> None:
    folder = cached(tmp_path, "some/model", ("config.json", "model-00001-of-00002.safetensors"))
    index = '{"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}'
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    assert asked("some/model", HF_HOME=str(tmp_path))[0] == "error"


def test_no_network_is_one_sentence(tmp_path: Path) -> None:
    kind, text = asked("some/model", HF_HOME=str(tmp_path), HF_HUB_OFFLINE="0", HF_ENDPOINT="http://127.0.0.1:9")
    assert kind == "error"
    assert "could not be fetched from Hugging Face" in text


def test_a_word_that_is_no_id(tmp_path: Path) -> None:
    kind, text = asked("not an id!", HF_HOME=str(tmp_path))
    assert (kind, "is no folder and no Hugging Face id" in text) == ("error", True)


def test_modelscope_is_named_where_it_is_missing(tmp_path: Path) -> None:
    kind, text = asked("modelscope:some/model", HF_HOME=str(tmp_path))
    assert (kind, "pip install modelscope" in text) == ("error", True)


MODELSCOPE = """
def snapshot_download(model_id, allow_patterns=None):
    if model_id != "some/model":
        raise ValueError("no such model")
    assert "*.safetensors" in allow_patterns and "*.bin" not in allow_patterns
    return {folder!r}
"""


@pytest.mark.parametrize("word", ["modelscope:some/model", "some/model"])
def test_modelscope_is_asked_where_hugging_face_has_no_answer(tmp_path: Path, word: str) -> None:
    # The package is not among what is installed for tests: this one has its one function.
    (tmp_path / "modelscope.py").write_text(MODELSCOPE.format(folder=str(tmp_path)), encoding="utf-8")
    assert asked(word, HF_HOME=str(tmp_path), PYTHONPATH=str(tmp_path)) == ("found", str(tmp_path))
    kind, text = asked("other/model", HF_HOME=str(tmp_path), PYTHONPATH=str(tmp_path))
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


def test_a_mirror_is_fetched_from_and_tells_how_far_it_is(tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Mirror)
    Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        online = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1"}
        kind, text = asked("some/model", **online)
        assert (kind, asked("some/missing", **online)[0]) == ("found", "error")
    finally:
        server.shutdown()
        server.server_close()
    folder = Path(text.partition(" told ")[0])
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (folder / "model.safetensors").stat().st_size == 200_000
    total = sum(len(data) for file, data in FILES.items() if not file.endswith(".bin"))
    assert text.endswith(f"told fetching some/model {total} of {total}")
    assert asked("some/model", HF_HOME=str(tmp_path)) == ("found", str(folder))
