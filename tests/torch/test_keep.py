"""Kept layers: floating inputs are cast to the dtype the layer has now, and nothing else changes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from narrowcast.dtype_policies import keep
from narrowcast.errors import UnsupportedError
from narrowcast.plan.carrier import Status
from narrowcast.plan.tree import Member, Parameter, Site
from narrowcast.torch import scheme

from .floats import Custom, packed, put, randn


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_inputs_are_cast_to_the_present_dtype(dtype):
    linear = nn.Linear(6, 4).to(dtype)
    x = randn(3, 6).half()
    expected = linear(x.to(dtype))
    assert torch.equal(put(linear, "keep")(x), expected)


def test_parameters_and_outputs_are_not_touched():
    class Wide(nn.Linear):
        def forward(self, x):
            return super().forward(x).double()

    linear = Wide(6, 4)
    weight = linear.weight
    put(linear, "keep")
    assert linear.weight is weight
    assert linear(randn(3, 6).bfloat16()).dtype is torch.float64


def test_conversion_takes_effect_on_a_kept_layer():
    linear = put(nn.Linear(6, 4), "keep").double()
    assert linear.weight.dtype is torch.float64
    assert linear(randn(3, 6)).dtype is torch.float64


@pytest.mark.parametrize(
    "make, inputs",
    [
        (lambda: nn.Embedding(5, 4), lambda: (torch.tensor([1, 2]),)),
        (lambda: nn.LSTM(6, 4), lambda: (packed()._replace(data=packed().data.bfloat16()),)),
        (lambda: nn.MultiheadAttention(8, 2), lambda: (randn(5, 2, 8).bfloat16(),) * 3),
        (lambda: nn.LayerNorm(6), lambda: (randn(3, 6).bfloat16(),)),
        (Custom, lambda: (randn(3, 6).bfloat16(),)),
    ],
)
def test_every_kind_can_be_kept(make, inputs):
    module = put(make(), "keep")
    out = module(*inputs())
    out = out[0] if isinstance(out, tuple) else out
    assert getattr(out, "data", out).dtype is torch.float32


def test_dtype_followed_is_that_of_the_largest_parameter():
    linear = nn.Linear(6, 4).bfloat16()
    linear.bias.data = linear.bias.data.float()
    seen = []
    put(linear, "keep")
    linear.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    with pytest.raises(RuntimeError, match=r"dtype|type"):
        linear(randn(3, 6))  # the plain layer cannot mix them either
    assert linear._narrowcast_follows == "weight"


def test_module_without_floating_parameters_is_left_as_it_is():
    relu = put(nn.ReLU(), "keep")
    assert type(relu) is nn.ReLU
    assert "_dtype_policy" not in vars(relu)


def test_parametrized_layer_can_be_kept():
    linear = put(torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)), "keep")
    assert linear(randn(3, 6).bfloat16()).dtype is torch.float32


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_cast_as_well(clone):
    linear = clone(put(nn.Linear(6, 4), "keep"))
    assert linear(randn(3, 6).half()).dtype is torch.float32
    assert linear.dtype_policy == keep


def test_module_that_does_not_run_the_forward_of_its_class_is_refused():
    with pytest.warns(DeprecationWarning, match="torch.jit.script"):
        script = torch.jit.script(nn.Linear(6, 4))
    replaced = nn.Linear(6, 4)
    replaced.forward = replaced.forward
    for module in (script, replaced):
        with pytest.raises(UnsupportedError, match="is kept, and its inputs cannot be cast to its dtype"):
            put(module, "keep")


def test_undo_gives_the_class_back():
    linear = put(nn.Linear(6, 4), "keep")
    scheme.commit(scheme.find(keep, "linear").undo(linear))
    assert type(linear) is nn.Linear
    assert vars(linear).keys() == vars(nn.Linear(6, 4)).keys()


def test_verdict_changes_no_bytes():
    member = Member(("a",), "linear", "Linear", (Parameter("weight", (4, 6), "float16"),))
    verdict = scheme.find(keep, "linear").judge(Site((member,)), member, keep)
    assert (verdict.status, verdict.bytes_after) == (Status.APPLIED, 48)


def test_full_graph_compile_works():
    linear = put(nn.Linear(6, 4), "keep")
    x = randn(3, 6).bfloat16()
    torch._dynamo.reset()
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), linear(x))
