"""Float policies under `torch.compile(fullgraph=True)` and `torch.export`: arguments, state, signatures."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from .floats import CASES, Custom, leaves, make, put, randn

Pair = namedtuple("Pair", "left right")


@dataclass
class Batch:
    x: torch.Tensor
    ids: torch.Tensor


def compiled(module, **options):
    torch.compiler.reset()
    return torch.compile(module, fullgraph=True, backend="aot_eager", **options)


class Summing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(randn(4, seed=1))
        self.calls = 0

    def forward(self, batch, scale: float = 1.0):
        self.calls += 1
        x = batch[0] if isinstance(batch, tuple | list) else batch["x"] if isinstance(batch, dict) else batch.x
        return x * self.weight * scale


@pytest.mark.parametrize(
    "batch",
    [[torch.ones(2, 4)], (torch.ones(2, 4), 3), {"x": torch.ones(2, 4)}, Pair(torch.ones(2, 4), torch.arange(2))],
    ids=lambda value: type(value).__name__,
)
def test_containers_are_cast_inside_the_graph(batch):
    module = put(Summing(), "mixed_bfloat16")
    out = compiled(module)(batch, scale=2.0)
    assert out.dtype is torch.bfloat16
    assert torch.equal(out, module(batch, scale=2.0))


@pytest.mark.parametrize("batch", [Batch(torch.ones(2, 4), torch.arange(2)), OrderedDict(x=torch.ones(2, 4))])
def test_containers_of_other_types_are_cast_too(batch):
    module = put(Summing(), "mixed_bfloat16")
    assert torch.equal(compiled(module)(batch), module(batch))


def test_state_written_in_forward_is_kept():
    module = put(Summing(), "mixed_bfloat16")
    traced = compiled(module)
    traced([torch.ones(2, 4)])
    traced([torch.ones(2, 4)])
    assert module.calls == 2


def test_statistics_that_need_a_cast_are_updated():
    module, twin = put(nn.BatchNorm1d(4), "float64"), put(nn.BatchNorm1d(4), "float64")
    x = randn(5, 4)
    for _ in range(2):
        twin(x)
        compiled(module)(x)
    assert torch.equal(module.running_mean, twin.running_mean)
    assert module.running_mean.dtype is torch.float32


def test_gradients_reach_the_masters():
    module = put(Custom(), "mixed_bfloat16")
    compiled(module)(randn(5, 6)).sum().backward()
    expected = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad(set_to_none=True)
    module(randn(5, 6)).sum().backward()
    for name, parameter in module.named_parameters():
        assert expected[name].dtype is torch.float32
        # Sums over five rows, rounded to bfloat16 in another order.
        assert torch.allclose(expected[name], parameter.grad, rtol=2 * 2.0**-8, atol=2 * 2.0**-8), name


def test_compile_before_the_policy_follows_it():
    linear = nn.Linear(6, 4)
    torch.compiler.reset()
    traced = torch.compile(linear, backend="aot_eager")
    assert traced(randn(3, 6)).dtype is torch.float32
    put(linear, "mixed_bfloat16")
    assert traced(randn(3, 6)).dtype is torch.bfloat16


def test_outer_autocast_does_not_overrule_inside_the_graph():
    linear = put(nn.Linear(6, 4), "float32")
    traced = compiled(linear)
    with torch.autocast("cpu", torch.bfloat16):
        assert traced(randn(3, 6)).dtype is torch.float32


# Dynamo does not follow recurrent modules, with or without a policy; what export does is in test_recurrent.py.
TRACED = [name for name in CASES if not any(word in name for word in ("lstm", "gru", "rnn"))]


@pytest.mark.parametrize("name", TRACED)
def test_exported_program_has_the_keys_and_the_dtype_of_the_module(name):
    module, inputs = put(make(name), "mixed_bfloat16").eval(), CASES[name].inputs()
    program = torch.export.export(module, inputs)
    expected = leaves(module(*inputs))
    assert program.state_dict.keys() == module.state_dict().keys()
    for got, want in zip(leaves(program.module()(*inputs)), expected, strict=True):
        assert got.dtype is want.dtype
        # The same operators in the same order; PyTorch's fused attention is not one of them.
        limit = 0 if "attention" not in name else 12 * 2.0**-8 * want.abs().max().item()
        assert (got.float() - want.float()).abs().max().item() <= limit


def test_dynamic_shapes_are_given_by_the_names_of_the_modules_own_arguments():
    linear = put(nn.Linear(6, 4), "mixed_bfloat16")
    program = torch.export.export(linear, (randn(3, 6),), dynamic_shapes={"input": {0: torch.export.Dim("rows")}})
    assert program.module()(randn(7, 6)).shape == (7, 4)


def test_symbolic_trace_keeps_layers_whole():
    model = nn.Sequential(put(nn.Linear(6, 4), "mixed_bfloat16"), nn.ReLU())
    graph = torch.fx.symbolic_trace(model)
    assert [node.op for node in graph.graph.nodes] == ["placeholder", "call_module", "call_module", "output"]
    assert graph(randn(3, 6)).dtype is torch.bfloat16
