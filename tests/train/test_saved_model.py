"""Models written from shards by several processes load as if one had saved them."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent))

from small_models import config_of, on_meta, real

from tightfit.train import saved_model
from tightfit.train.saved_model import (
    ADAPTER,
    FileStyle,
    SaveError,
    TensorPiece,
    Writer,
    adapter_files,
    model_files,
    write_model,
)
from tightfit.train.sources import adapter_name, name_parts, names_of, rename_pieces
from tightfit.types import UserError

SHAPES = {"a": (7, 5), "b": (33,), "c": (2, 3, 4), "scalar": ()}


def values(name: str) -> torch.Tensor:
    shape = SHAPES[name]
    return torch.arange(max(1, torch.Size(shape).numel()), dtype=torch.float32).reshape(shape) + ord(name[0])


def cut(name: str, whole: torch.Tensor, rank: int, world: int) -> TensorPiece:
    """An odd share: rank 0 has least, and shares meet inside rows."""
    flat = whole.reshape(-1)
    cuts = [flat.numel() * (i * i) // (world * world) for i in range(world + 1)]
    return TensorPiece(name, tuple(whole.shape), cuts[rank], flat[cuts[rank] : cuts[rank + 1]])


def alone() -> None:
    """The barrier of a world of one."""


def run_ranks(world: int, target: Callable[..., None], *arguments: Any) -> list[int | None]:
    """Real processes with a real barrier; their exit codes."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(world, timeout=60)
    ranks = [context.Process(target=target, args=(rank, world, barrier.wait, *arguments)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    return [rank.exitcode for rank in ranks]


def save_share(rank: int, world: int, barrier: Callable[[], None], folder: Path, model: Any, shard_bytes: int) -> None:
    parts = name_parts(model)
    own = {name: tensor.detach() for name, tensor in model.named_parameters()}
    pieces = rename_pieces((cut(name, tensor, rank, world) for name, tensor in own.items()), parts)
    beside = model_files(model.config, type(model).__name__, torch.float32)
    style = FileStyle(shard_bytes=shard_bytes, beside=beside)
    names = names_of(parts, lambda _: torch.float32)
    write_model(folder, pieces, names, rank=rank, world=world, barrier=barrier, style=style)


@pytest.mark.thorough
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("family", ["llama", pytest.param("qwen2", marks=pytest.mark.slow), "mamba", "mixtral"])
def test_from_pretrained_loads_what_the_ranks_wrote(tmp_path: Path, family: str, world: int) -> None:
    model = real(config_of(family))
    shard_bytes = 200_000 if world == 2 else 5 * 10**9
    assert run_ranks(world, save_share, tmp_path / "model", model, shard_bytes) == [0] * world
    loaded, said = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(said[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    theirs = loaded.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(theirs[name], tensor), name
    assert (tmp_path / "model" / "model.safetensors.index.json").exists() == (world == 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_experts_are_saved_under_the_names_that_other_programs_know(tmp_path: Path) -> None:
    model = real(config_of("qwen3_moe"))
    save_share(0, 1, alone, tmp_path / "ours", model, 5 * 10**9)
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / who / "model.safetensors") for who in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_config_says_what_was_saved(tmp_path: Path) -> None:
    config = config_of("llama", use_cache=False)
    save_share(0, 1, alone, tmp_path / "model", real(config), 5 * 10**9)
    saved = json.loads((tmp_path / "model" / "config.json").read_text(encoding="utf-8"))
    assert saved["architectures"] == ["LlamaForCausalLM"]
    assert saved["dtype"] == "float32"
    assert saved["use_cache"] is True


def write_plain(folder: Path, pieces: Iterable[TensorPiece], dtype: torch.dtype = torch.float32) -> int:
    names = {name: (shape, dtype) for name, shape in SHAPES.items()}
    return write_model(folder, pieces, names, rank=0, world=1, barrier=alone)


def all_pieces() -> Iterator[TensorPiece]:
    return (TensorPiece(name, shape, 0, values(name).reshape(-1)) for name, shape in SHAPES.items())


def test_tensors_are_cast_as_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_model, "HOST_BYTES", 64)
    written = write_plain(tmp_path / "model", all_pieces(), torch.bfloat16)
    file = tmp_path / "model" / "model.safetensors"
    assert written == file.stat().st_size
    loaded = load_file(file)
    for name in SHAPES:
        assert torch.equal(loaded[name], values(name).bfloat16())


def test_mixed_dtypes_stay_aligned(tmp_path: Path) -> None:
    names = {"odd": ((3,), torch.bfloat16), "wide": ((5,), torch.float64), "flag": ((3,), torch.bool)}
    given = {"odd": torch.ones(3), "wide": torch.arange(5).double(), "flag": torch.tensor([True, False, True])}
    pieces = [TensorPiece(name, names[name][0], 0, tensor) for name, tensor in given.items()]
    write_model(tmp_path / "model", pieces, names, rank=0, world=1, barrier=alone)
    loaded = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(loaded[name].double(), tensor.double()) for name, tensor in given.items())


def test_an_element_that_nobody_wrote_is_an_error_that_names_its_tensor(tmp_path: Path) -> None:
    pieces = [TensorPiece("b", (33,), 0, values("b")[:20]), *(piece for piece in all_pieces() if piece.name != "b")]
    with pytest.raises(SaveError, match="only 20 of the 33 elements of 'b'"):
        write_plain(tmp_path / "model", pieces)
    assert list(tmp_path.iterdir()) == []


def test_ranks_may_write_the_same_elements(tmp_path: Path) -> None:
    write_plain(tmp_path / "model", [*all_pieces(), *all_pieces()])
    assert torch.equal(load_file(tmp_path / "model" / "model.safetensors")["a"], values("a"))


@pytest.mark.parametrize(
    "piece",
    [
        TensorPiece("z", (3,), 0, torch.ones(3)),
        TensorPiece("b", (33,), 30, torch.ones(9)),
        TensorPiece("b", (3,), 0, torch.ones(3)),
    ],
)
def test_a_piece_that_does_not_belong_is_refused(tmp_path: Path, piece: TensorPiece) -> None:
    with pytest.raises(SaveError, match="not among what is being saved"):
        write_plain(tmp_path / "model", [piece])


def test_a_failed_save_leaves_the_old_folder_as_it_was(tmp_path: Path) -> None:
    write_plain(tmp_path / "model", all_pieces())
    before = (tmp_path / "model" / "model.safetensors").read_bytes()

    def broken() -> Iterator[TensorPiece]:
        yield from list(all_pieces())[:2]
        raise RuntimeError("the engine has died")

    with pytest.raises(RuntimeError, match="the engine has died"):
        write_plain(tmp_path / "model", broken())
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_what_a_killed_save_left_goes_with_the_next(tmp_path: Path) -> None:
    Writer(tmp_path / "model", rank=0, world=1, barrier=lambda: None)  # and then it is killed
    (tmp_path / ".model.partial" / "model.safetensors").write_text("torn", encoding="utf-8")
    write_plain(tmp_path / "model", all_pieces())
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["model", "model.safetensors"]


def test_a_run_knows_what_it_left_when_it_was_killed_between_its_last_note_and_the_renaming(tmp_path: Path) -> None:
    torn = tmp_path / ".model.partial" / "model.safetensors"
    torn.parent.mkdir()
    torn.write_text("torn", encoding="utf-8")
    with pytest.raises(UserError, match="was not written by tightfit"):
        write_plain(tmp_path / "model", all_pieces())
    began = {"event": "start", "at": 0, "model": "m", "engine": "fsdp2", "world": 1, "launcher": "tightfit"}
    (tmp_path / "events.jsonl").write_text(json.dumps(began) + "\n", encoding="utf-8")
    write_plain(tmp_path / "model", all_pieces())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events.jsonl", "model"]


def one_rank_fails(rank: int, world: int, barrier: Callable[[], None], folder: Path) -> None:
    def pieces() -> Iterator[TensorPiece]:
        for name in SHAPES:
            yield cut(name, values(name), rank, world)
        if rank == 1:
            raise OSError(5, "Input/output error")

    names = {name: (shape, torch.float32) for name, shape in SHAPES.items()}
    try:
        write_model(folder, pieces(), names, rank=rank, world=world, barrier=barrier)
    except UserError as error:
        os._exit(21 if "input/output error" in str(error) else 1)
    except SaveError as error:
        os._exit(22 if "rank 1 could not write" in str(error) else 1)


@pytest.mark.thorough
def test_when_one_rank_fails_all_of_them_say_so(tmp_path: Path) -> None:
    assert run_ranks(3, one_rank_fails, tmp_path / "model") == [22, 21, 22]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match=r"cannot write .*: (not a directory|file exists)"):
        write_plain(tmp_path / "file" / "model", all_pieces())


def test_several_sets_in_one_folder(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "step-5", rank=0, world=1, barrier=alone)
    names = {name: (shape, torch.float32) for name, shape in SHAPES.items()}
    writer.write(names, all_pieces())
    writer.write(names, all_pieces(), FileStyle(stem="moments", shard_bytes=100))
    writer.commit(lambda folder: (folder / "state.json").write_text("{}", encoding="utf-8") and None)
    files = sorted(path.name for path in (tmp_path / "step-5").iterdir())
    assert files[0] == "model.safetensors"
    assert files[-2:] == ["moments.safetensors.index.json", "state.json"]
    index = json.loads((tmp_path / "step-5" / "moments.safetensors.index.json").read_text(encoding="utf-8"))
    assert torch.equal(load_file(tmp_path / "step-5" / index["weight_map"]["b"])["b"], values("b"))


def test_peft_loads_an_adapter(tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    base = real(config_of("llama"))
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    trained = {adapter_name(name): p.detach() for name, p in adapted.named_parameters() if p.requires_grad}
    names = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in trained.items()}
    pieces = [TensorPiece(name, tuple(tensor.shape), 0, tensor.reshape(-1)) for name, tensor in trained.items()]
    style = FileStyle(
        stem=ADAPTER.stem, shard_bytes=None, beside=adapter_files(adapted.peft_config["default"], "some/base")
    )
    write_model(tmp_path / "adapter", pieces, names, rank=0, world=1, barrier=alone, style=style)
    loaded = PeftModel.from_pretrained(real(config_of("llama")), tmp_path / "adapter")
    theirs = dict(loaded.named_parameters())
    assert all(torch.equal(theirs[name], p) for name, p in adapted.named_parameters())
    saved = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    assert saved["base_model_name_or_path"] == "some/base"


def test_every_family_has_a_way_to_be_saved() -> None:
    for family in ("gpt_neox", "gemma3_text", "mamba2"):
        model = on_meta(config_of(family))
        parts = name_parts(model)
        assert set(parts) == {name for name, _ in model.named_parameters()}


def test_somebodys_files_where_a_model_is_written_stay(tmp_path: Path) -> None:
    """Its place, and the one in which it is made ready, may hold something by accident."""
    tensors = {"weight": torch.ones(4)}
    names = {"weight": ((4,), torch.float32)}

    def write() -> None:
        pieces = [TensorPiece(name, tuple(one.shape), 0, one) for name, one in tensors.items()]
        write_model(tmp_path / "model", pieces, names, rank=0, world=1, barrier=lambda: None)

    for place in ("model", ".model.partial"):
        mine = tmp_path / place / "model.safetensors"
        mine.parent.mkdir()
        mine.write_text("mine")
        with pytest.raises(UserError, match=rf"{place} (was not written by tightfit|is no checkpoint)"):
            write()
        assert mine.read_text() == "mine"
        assert sorted(path.name for path in tmp_path.iterdir()) == [place]
        mine.unlink()
        mine.parent.rmdir()
    (tmp_path / "model").mkdir()
    write()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["model", "model.safetensors"]
