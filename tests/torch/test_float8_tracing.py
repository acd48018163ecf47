"""float8 layers under torch.compile, alone and with all else that is traced: one graph, the same numbers and state."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowcast
from tests.torch.test_float8_state import Net, assert_same_state, randn, sgd, state

pytestmark = [
    # PyTorch's own compiler warns of itself.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
    pytest.mark.filterwarnings("ignore:.*torch.autograd.function.Function.* should not be instantiated"),
]


class Block(nn.Module):
    """Attention, and a layer used twice; recomputed in backward if told so."""

    def __init__(self, mode, reentrant=None):
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.linear = nn.Linear(16, 16)
        self.reentrant = reentrant
        narrowcast.apply(self, {"attention|linear": mode})

    def body(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.linear(torch.relu(self.linear(x)))

    def forward(self, x):
        return self.body(x) if self.reentrant is None else checkpoint(self.body, x, use_reentrant=self.reentrant)


def train(model, call, num_steps=2):
    """Losses of some steps, each of two micro-batches."""
    optimizer, losses = sgd(model), []
    for seed in range(num_steps):
        for micro in range(2):
            loss = call(randn(2, 5, 16, seed=10 * seed + micro).requires_grad_()).square().sum()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


@pytest.mark.parametrize(
    "mode, reentrant",
    [
        ("float8", False),
        ("float8", True),
        ("float8/current", False),
        ("float8/rowwise", False),
        ("float8/block", False),
    ],
    ids=str,
)
def test_compiled_recomputed_and_accumulated_training_is_plain_training(mode, reentrant):
    plain, all_of_it = Block(mode), Block(mode, reentrant)
    call = torch.compile(all_of_it, backend="aot_eager", fullgraph=True)
    # The fused attention's backward may sum in another order when it is recomputed: a few units of float32.
    torch.testing.assert_close(train(all_of_it, call), train(plain, plain), rtol=1e-6, atol=1e-6)
    for name, tensor in state(plain).items():
        torch.testing.assert_close(state(all_of_it)[name], tensor, rtol=1e-6, atol=0)


def test_the_first_step_and_later_ones_are_one_graph():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    model = Net()
    call, optimizer = torch.compile(model, backend=backend, fullgraph=True), sgd(model)
    for seed in range(4):
        call(randn(5, 16, seed=seed)).square().sum().backward()
        optimizer.step()
    assert len(graphs) == 1
    assert model.a.float8_history_index.tolist() == [4, 4, 4]


def test_evaluation_is_a_graph_that_leaves_the_state():
    model = Net()
    model(randn(5, 16)).square().sum().backward()
    sgd(model).step()
    before = state(model)
    call = torch.compile(model.eval(), backend="eager", fullgraph=True)
    x = randn(5, 16, factor=100.0)
    with torch.no_grad():
        assert torch.equal(call(x), model(x))
    assert_same_state(state(model), before)


def test_inductor_gives_the_same_and_does_not_hide_what_is_not_finite():
    plain, traced = (narrowcast.apply(nn.Linear(16, 16, bias=False), "float8") for _ in range(2))
    traced.load_state_dict(plain.state_dict())
    call = torch.compile(traced, fullgraph=True)
    x = randn(5, 16)
    for model, run in ((plain, plain), (traced, call)):
        run(x).square().sum().backward()
        sgd(model).step()
    # Another order of the float32 sums.
    torch.testing.assert_close(traced.weight.grad, plain.weight.grad, rtol=1e-5, atol=1e-6)
    assert torch.equal(traced.float8_scale[:2], plain.float8_scale[:2])
    before = state(traced)
    traced.weight.grad = None
    x[0, 0] = torch.inf
    call(x).sum().backward()
    assert traced.weight.grad.isnan().any()
    assert traced.float8_pending_amax[0] == 0
    assert all(torch.equal(traced.state_dict()[name], before[name]) for name in before if "pending" not in name)


def test_a_compiled_step_moves_the_state_on():
    model = Net()
    optimizer = sgd(model)
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    for count in range(1, 3):
        model(randn(5, 16)).square().sum().backward()
        step()
        assert model.a.float8_history_index.tolist() == [count] * 3


def test_an_empty_batch_compiles():
    model = Net()
    call = torch.compile(model, backend="eager", fullgraph=True)
    assert call(torch.zeros(0, 16)).shape == (0, 4)
