"""What a training loop gets: batches, packed rows, the worst of them, made-up ones."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tightfit.train.data.samples import IGNORED, Samples, Split, batch, flatten, open_samples, pack, worst
from tightfit.train.data.spec import DataSpec

Built = Callable[..., Split]
Lines = Callable[..., str]


def documents(count: int) -> list[dict[str, str]]:
    return [{"text": "abcdefgh"[at % 8] * (5 + at * 7 % 60)} for at in range(count)]


def tiny_llama(attention: str = "sdpa") -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config).eval()


# --- batches --------------------------------------------------------------------------------------


def test_rows_are_padded_on_the_right_to_a_multiple_of_eight(built: Built, bytes_tokenizer: Any, lines: Lines) -> None:
    train = built(DataSpec(path=lines(*documents(20)), sequence=100), bytes_tokenizer).train
    made = batch(train, [3, 1, 4], 257)
    lengths = [int(train.lengths[at]) for at in (3, 1, 4)]
    assert made.input_ids.shape == (3, -(-max(lengths) // 8) * 8)
    assert made.input_ids.dtype == made.labels.dtype == torch.int64
    assert made.position_ids is None
    for row, index in enumerate((3, 1, 4)):
        sample = train[index]
        assert made.input_ids[row, : lengths[row]].tolist() == sample.ids.tolist()
        assert made.labels[row, : lengths[row]].tolist() == sample.labels.tolist()
        assert (made.input_ids[row, lengths[row] :] == 257).all()
        assert (made.labels[row, lengths[row] :] == IGNORED).all()
    assert batch(train, [3], 257, pad_to=96).input_ids.shape == (1, 96)
    with pytest.raises(ValueError, match="does not fit"):
        batch(train, [3], 257, pad_to=8)


def test_no_row_is_longer_than_the_sequence(built: Built, bytes_tokenizer: Any) -> None:
    train = built(DataSpec(path="shipped:text", sequence=99), bytes_tokenizer).train
    assert batch(train, [0, 1], 0).input_ids.shape == (2, 99)


def test_loss_tokens_are_the_labels_that_count_after_the_shift(
    built: Built, bytes_tokenizer: Any, lines: Lines
) -> None:
    path = lines({"instruction": "a", "output": "bcd"}, {"instruction": "ef", "output": "g"})
    for spec in (DataSpec(path=path, sequence=128), DataSpec(path=path, sequence=128, packing=True)):
        train = built(spec, bytes_tokenizer).train
        made = batch(train, range(len(train)), 0)
        assert int((made.labels[:, 1:] != IGNORED).sum()) == int(train.loss_tokens.sum()) == 6


def test_the_worst_batch_is_the_longest_samples(built: Built, bytes_tokenizer: Any, lines: Lines) -> None:
    train = built(DataSpec(path=lines(*documents(40)), sequence=100), bytes_tokenizer).train
    chosen = worst(train, 7)
    assert sorted(train.lengths[chosen].tolist()) == sorted(train.lengths.tolist())[-7:]
    assert train.lengths[chosen].tolist() == sorted(train.lengths[chosen].tolist(), reverse=True)
    few = worst(train, 100)
    assert len(few) == 100
    assert set(few.tolist()) == set(range(40))


def test_counts(built: Built, bytes_tokenizer: Any, lines: Lines) -> None:
    train = built(DataSpec(path=lines(*documents(40)), sequence=100), bytes_tokenizer).train
    assert (len(train), int(train.lengths.max())) == (40, 65)
    assert int(train.lengths.sum()) - int(train.loss_tokens.sum()) == 40


# --- held back ------------------------------------------------------------------------------------


def test_what_is_held_back_is_never_trained_on(built: Built, bytes_tokenizer: Any, lines: Lines) -> None:
    path = lines(*({"text": f"text number {at}"} for at in range(200)))
    split = built(DataSpec(path=path, sequence=64, evaluation_split=0.1), bytes_tokenizer)
    assert split.held is not None

    def texts(samples: Samples) -> set[bytes]:
        return {samples[at].ids.tobytes() for at in range(len(samples))}

    assert (len(split.train), len(split.held)) == (180, 20)
    assert not texts(split.train) & texts(split.held)
    other = built(DataSpec(path=path, sequence=64, evaluation_split=0.1, seed=1), bytes_tokenizer)
    assert other.held is not None
    assert texts(other.held) != texts(split.held)
    few = built(DataSpec(path=path, sequence=64, evaluation_split=0.1, max_samples=50), bytes_tokenizer)
    assert few.held is not None
    assert (len(few.train), len(few.held)) == (45, 5)
    assert built(DataSpec(path=path, sequence=64), bytes_tokenizer).held is None


# --- packing --------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_packed_rows_hold_every_document_whole(built: Built, bytes_tokenizer: Any, lines: Lines) -> None:
    path = lines(*documents(300))
    plain = built(DataSpec(path=path, sequence=128), bytes_tokenizer).train
    rows = built(DataSpec(path=path, sequence=128, packing=True), bytes_tokenizer).train
    assert rows.packed
    assert rows.lengths.max() <= 128
    assert rows.lengths.mean() > 120
    assert int(rows.loss_tokens.sum()) == int(plain.loss_tokens.sum())
    found = []
    for at in range(len(rows)):
        row = rows[at]
        assert all(row.labels[start] == IGNORED for start in row.starts)
        found += [part.tobytes() for part in np.split(row.ids, row.starts[1:])]
    assert sorted(found) == sorted(plain[at].ids.tobytes() for at in range(len(plain)))


@pytest.mark.thorough
def test_packing_is_quick_and_the_same_every_time() -> None:
    lengths = np.random.default_rng(0).integers(1, 2049, size=200_000)
    order, borders = pack(lengths, 2048)
    rows = np.add.reduceat(lengths[order], borders[:-1])
    assert sorted(order.tolist()) == list(range(200_000))
    assert rows.max() <= 2048
    assert rows.mean() > 0.98 * 2048
    again = pack(lengths, 2048)
    assert (again[0] == order).all()
    assert (again[1] == borders).all()


@pytest.mark.thorough
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_no_document_sees_another(built: Built, bytes_tokenizer: Any, lines: Lines, attention: str) -> None:
    """Logits of a packed document are those of the document alone, in fp32 up to the order of sums."""
    rows = built(DataSpec(path=lines(*documents(30)), sequence=128, packing=True), bytes_tokenizer).train
    model = tiny_llama(attention)
    made = batch(rows, [0, 1, 2], 257)
    assert made.position_ids is not None
    with torch.no_grad():
        together = model(input_ids=made.input_ids, position_ids=made.position_ids, use_cache=False).logits
        leaking = model(input_ids=made.input_ids, use_cache=False).logits
        for row in range(3):
            starts = [*rows[row].starts, len(rows[row].ids)]
            assert len(starts) > 2
            for first, last in pairwise(starts):
                alone = model(input_ids=made.input_ids[row : row + 1, first:last], use_cache=False).logits[0]
                torch.testing.assert_close(together[row, first:last], alone, atol=1e-5, rtol=1e-5)
            second = slice(starts[1], starts[2])
            assert (leaking[row, second] - together[row, second]).abs().max() > 1e-3


def test_rows_after_another_in_one_row_stay_apart(built: Built, bytes_tokenizer: Any, lines: Lines) -> None:
    rows = built(DataSpec(path=lines(*documents(30)), sequence=128, packing=True), bytes_tokenizer).train
    made = batch(rows, [0, 1, 2], 257)
    one = flatten(made)
    assert one.position_ids is not None
    assert one.input_ids.shape == (1, made.input_ids.numel())
    model = tiny_llama()
    with torch.no_grad():
        apart = model(input_ids=made.input_ids, position_ids=made.position_ids, use_cache=False).logits
        flat = model(input_ids=one.input_ids, position_ids=one.position_ids, use_cache=False).logits
    torch.testing.assert_close(flat.view_as(apart), apart, atol=1e-5, rtol=1e-5)


def test_padding_changes_no_logit() -> None:
    model = tiny_llama()
    ids = torch.arange(1, 11)[None]
    with torch.no_grad():
        alone = model(input_ids=ids, use_cache=False).logits
        padded = model(input_ids=torch.nn.functional.pad(ids, (0, 6)), use_cache=False).logits
    torch.testing.assert_close(padded[:, :10], alone, atol=1e-5, rtol=1e-5)


# --- made-up samples ------------------------------------------------------------------------------


def test_without_data_samples_are_made_up(bytes_tokenizer: Any, cache: Any) -> None:
    spec = DataSpec(sequence=64, seed=3)
    train = open_samples(spec, bytes_tokenizer, cache).train
    assert (len(train), set(train.lengths.tolist()), set(train.loss_tokens.tolist())) == (1024, {64}, {63})
    assert train[5].ids.tolist() == open_samples(spec, bytes_tokenizer, cache).train[5].ids.tolist()
    assert train[5].ids.tolist() != train[6].ids.tolist()
    assert max(train[at].ids.max() for at in range(20)) < len(bytes_tokenizer)
    split = open_samples(DataSpec(sequence=64, samples=50, evaluation_split=0.1), bytes_tokenizer, cache)
    assert split.held is not None
    assert (len(split.train), len(split.held)) == (45, 5)
    assert split.train[44].ids.tolist() != split.held[0].ids.tolist()
    assert not cache.exists()


@pytest.mark.thorough
def test_looking_at_data_loads_no_torch() -> None:
    script = (
        "import sys, tempfile\nfrom pathlib import Path\n"
        "from tightfit.train.data.samples import open_samples, prepare\n"
        "from tightfit.train.data.spec import DataSpec\n"
        "from tightfit.train.data.tokens import byte_tokenizer\n"
        "spec, cache = DataSpec(path='shipped:text', sequence=64), Path(tempfile.mkdtemp())\n"
        "prepare(spec, byte_tokenizer(), cache, lambda *_: None)\n"
        "assert len(open_samples(spec, byte_tokenizer(), cache).train[0].ids) == 64\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
