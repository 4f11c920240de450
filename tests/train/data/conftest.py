"""Tokenizers and files that the data's tests share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tightfit.train.data.cache import identify, read_manifest
from tightfit.train.data.chat import SHIPPED
from tightfit.train.data.samples import Split, open_samples, prepare
from tightfit.train.data.spec import DataSpec
from tightfit.train.data.tokens import byte_tokenizer, codec_of

Told = list[tuple[int, int, str]]


@pytest.fixture(scope="session")
def bytes_tokenizer() -> Any:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def words_tokenizer() -> Any:
    """A small BPE tokenizer as models have them: merges, a BOS that is added, no chat template."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>"]
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train([str(SHIPPED / "stories.txt")], trainer)
    from tokenizers.processors import TemplateProcessing

    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def kept_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For data that several tests look at and none changes."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def built(cache: Path) -> Callable[..., Split]:
    """Prepare and open in one."""
    return builds_in(cache)


@pytest.fixture(scope="session")
def kept(kept_cache: Path) -> Callable[..., Split]:
    """The same, in the cache that is kept."""
    return builds_in(kept_cache)


def builds_in(cache: Path) -> Callable[..., Split]:
    def build(spec: DataSpec, tokenizer: Any, told: Told | None = None) -> Split:
        said: Told = [] if told is None else told
        prepare(spec, tokenizer, cache, lambda *what: said.append(what))
        return open_samples(spec, tokenizer, cache)

    return build


@pytest.fixture(scope="session")
def counted(kept_cache: Path) -> Callable[..., dict[str, Any]]:
    """What the store of a data set says that it was made from."""

    def read(spec: DataSpec, tokenizer: Any) -> dict[str, Any]:
        return read_manifest(identify(spec, codec_of(tokenizer, spec.template), kept_cache).folder)

    return read


@pytest.fixture
def lines(tmp_path: Path) -> Callable[..., str]:
    """A JSONL file of these examples."""

    def write(*trees: Any, name: str = "data.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(tree, ensure_ascii=False) + "\n" for tree in trees), encoding="utf-8")
        return str(path)

    return write
