"""What compiled layers keep may wait on the host: the same gradients, and nothing of it on the device meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_models import config_of, real
from test_compile import CPU, ROUNDING, WITHOUT_CODE, Said, train_once
from test_stream import WAYS, WINDOW, make, plain, run
from torch import Tensor, nn

from tightfit.train import compile as compiling
from tightfit.train import to_host
from tightfit.types import Checkpointing

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture(autouse=True)
def everything_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(to_host, "SMALLEST_MOVED_BYTES", 1)
    monkeypatch.setattr(compiling, "BACKEND", WITHOUT_CODE)
    torch._dynamo.reset()


HOW = [
    Checkpointing(layers=None, offload=True),
    Checkpointing(layers=None, offload=True, select=("elementwise",)),
    Checkpointing(layers=2, offload=True, select=("elementwise", "mlp")),
]


@pytest.mark.parametrize("how", [*(pytest.param(how, marks=pytest.mark.slow) for how in HOW[:2]), HOW[2]])
def test_gradients_are_those_of_a_model_that_keeps_everything(how: Checkpointing) -> None:
    model, said = real(config_of("llama", num_hidden_layers=4)), Said()
    expected, gradients = train_once(model)
    assert compiling.Compiler(said).compile(model, how, CPU) == (how.layers or 4)
    for length in (32, 16, 32):  # a shorter row uses a part of the buffers
        loss, found = train_once(model, length)
    assert loss == pytest.approx(expected, rel=ROUNDING)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)
    assert not said.told["warning"]


class Layer(nn.Module):
    """Keeps its input, two views of one product, and what it was given beside."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        made = x @ self.weight
        return x + (made[:, :4] * made[:, 4:]).repeat(1, 2) * table


def train_four(sending: int) -> tuple[list[Tensor], to_host.HostStore, list[int]]:
    """The gradients of four layers of which the lowest so many send what they keep, and how many tensors were still
    leaving after the forward pass of each."""
    torch.manual_seed(0)
    layers, table, x = [Layer() for _ in range(4)], torch.randn(8), torch.randn(3, 8, requires_grad=True)
    store, leaving, made = to_host.HostStore(CPU, lambda _: None), [], x
    for index, layer in enumerate(layers):
        made = store.run(Layer.__call__, index < sending, index, layer, made, table=table)
        leaving.append(len(store._below.leaving) if store._below else 0)
    made.square().sum().backward()
    return [each.grad for each in (x, *(layer.weight for layer in layers)) if each.grad is not None], store, leaving


def test_views_of_one_tensor_are_sent_once_and_what_is_not_the_layers_stays() -> None:
    expected, _, _ = train_four(0)
    found, store, leaving = train_four(3)
    assert all(map(torch.equal, found, expected))
    assert len(found) == len(expected) == 5
    assert leaving == [2, 2, 2, 0]  # input and product of the layer before; neither its weight nor the table
    sizes = {key: buffer.numel() for key, buffer in store._buffers.items()}
    assert sizes == {(index, 0, number): 3 * 8 * 4 for index in range(3) for number in range(2)}


def test_micro_batches_that_pass_a_layer_together_have_buffers_of_their_own() -> None:
    """Two windows of three, backwards in the opposite order, with an evaluation between them."""
    torch.manual_seed(0)
    layers, table, store = [Layer() for _ in range(3)], torch.randn(8), to_host.HostStore(CPU, lambda _: None)

    def pass_window(batches: list[Tensor], *, sends: bool) -> list[Tensor]:
        for layer in layers:
            layer.weight.grad = None
        made = batches
        for index, layer in enumerate(layers):
            made = [
                store.run(Layer.__call__, True, index, layer, each, table=table) if sends else layer(each, table)
                for each in made
            ]
        for each in reversed(made):
            each.square().sum().backward()
        return [layer.weight.grad for layer in layers if layer.weight.grad is not None]

    for _ in range(2):
        batches = [torch.randn(3, 8) for _ in range(3)]
        expected = pass_window(batches, sends=False)
        assert all(map(torch.equal, pass_window(batches, sends=True), expected))
        assert len(expected) == len(layers)
        with torch.no_grad():
            store.run(Layer.__call__, True, 0, layers[0], batches[0], table=table)
    assert {key[:2] for key in store._buffers} == {(index, number) for index in range(3) for number in range(3)}


@pytest.mark.parametrize(
    "way",
    [
        *(
            pytest.param(way, marks=pytest.mark.slow)
            for way in ("llama", "adapters", "the embeddings alone", "two stay")
        ),
        "frozen layers",
    ],
)
def test_layers_that_stream_send_what_they_keep(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All micro batches of a window."""
    model, levers = WAYS[way]
    how = Checkpointing(layers=4, offload=True, select=("elementwise", "mlp"))
    sending = replace(levers, compile="layers", checkpointing=how)
    expected = run(make(model, plain(levers)))
    engine, said, stores = make(model, sending), Said(), list[to_host.HostStore]()
    monkeypatch.setattr(compiling, "HostStore", lambda *given: stores.append(to_host.HostStore(*given)) or stores[0])
    compiling.Compiler(said).compile(engine.model, how, CPU)
    assert run(engine) == pytest.approx(expected, rel=2e-5)
    turns = {(layer, number) for layer in range(levers.frozen_layers, 4) for number in range(WINDOW)}
    assert {key[:2] for key in stores[0]._buffers} == turns
    assert not said.told["warning"]


def test_evaluation_sends_nothing() -> None:
    with torch.no_grad():
        layer, store = Layer(), to_host.HostStore(CPU, lambda _: None)
        store.run(Layer.__call__, True, 0, layer, torch.randn(3, 8), table=torch.randn(8))
    assert not store._buffers


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_copies_run_beside_the_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same losses and gradients as with everything on the device, through the compiler that users have, with less
    of it on the device."""
    monkeypatch.undo()
    config = config_of("llama", num_hidden_layers=6, hidden_size=1024, intermediate_size=2816)
    torch.manual_seed(0)
    ids = torch.randint(0, 300, (4, 1024), device="cuda")
    seen: dict[bool, tuple[float, list[Tensor], int]] = {}
    for sends in (False, True):
        torch.manual_seed(0)
        model = real(config).to("cuda", torch.bfloat16).train()
        how = Checkpointing(layers=None, select=("elementwise",), offload=sends)
        compiling.Compiler(Said()).compile(model, how, next(model.parameters()).device)
        for _ in range(3):
            model.zero_grad()
            before = torch.cuda.memory_allocated()
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            held = torch.cuda.memory_allocated() - before
            loss.backward()
        gradients = [each.grad.float().cpu() for each in model.parameters() if each.grad is not None]
        seen[sends] = float(loss.detach()), gradients, held
    assert seen[True][0] == pytest.approx(seen[False][0], rel=1e-4)
    for sent, stayed in zip(seen[True][1], seen[False][1], strict=True):  # attention adds up as its threads come
        assert (sent - stayed).norm() <= 0.02 * stayed.norm()
    assert seen[True][2] < 0.7 * seen[False][2]
