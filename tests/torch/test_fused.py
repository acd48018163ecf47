"""PyTorch's fused paths over children: off above modules that carry something, and every forward really runs."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

from narrowcast.dtype_policies import get
from narrowcast.torch import apply, dequantize, fused, scheme
from narrowcast.torch.carried import Cast
from narrowcast.torch.scheme import Carried

from .floats import put, put_on_all, randn


def encoder(*, batch_first=True, num_layers=2, activation="relu", norm_first=False):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        8, 2, 16, dropout=0.0, batch_first=batch_first, activation=activation, norm_first=norm_first
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors need batch_first, and say so
        return nn.TransformerEncoder(layer, num_layers, norm=nn.LayerNorm(8))


def turn_off(model, carried):
    scheme.commit(fused.changes_for(model, carried))
    return model


def fused_calls(model, *args, **kwargs):
    """How often PyTorch's fused operators ran in a call."""
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(*args, **kwargs)
    names = ("aten::_transformer_encoder_layer_fwd", "aten::_nested_tensor_from_mask")
    return sum(event.name in names for event in profile.events())


def counting(own, seen):
    def run(self, *args, **kwargs):
        seen.append(id(self))
        return own(self, *args, **kwargs)

    return run


@pytest.fixture
def runs(monkeypatch):
    """The ids of modules with a policy whose forward ran, counted below anything that could go around them."""
    seen = []
    stack = [Cast]
    while stack:
        cls = stack.pop()
        stack += cls.__subclasses__()
        if "_narrowcast_run" in vars(cls):
            monkeypatch.setattr(cls, "_narrowcast_run", counting(vars(cls)["_narrowcast_run"], seen))
    return seen


def test_plain_encoder_takes_the_fused_path():
    # Without this the tests below could not fail.
    assert fused_calls(encoder().eval(), randn(2, 5, 8)) == 2


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_every_site_runs_in_eval_mode(runs, batch_first, activation, norm_first, padded):
    model = encoder(batch_first=batch_first, activation=activation, norm_first=norm_first)
    put_on_all(model, "mixed_bfloat16")
    model.eval()
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2]) if padded else None
    x = randn(2, 5, 8) if batch_first else randn(5, 2, 8)
    assert fused_calls(model, x, src_key_padding_mask=padding) == 0
    expected = {id(module) for module in model.modules() if isinstance(module, Cast)}
    assert len(expected) == 2 * 9 + 2  # a layer, its attention, 2 linears, 2 norms, 3 dropouts; the encoder, its norm
    runs.clear()
    with torch.no_grad():
        assert model(x, src_key_padding_mask=padding).dtype is torch.bfloat16
    assert set(runs) == expected


@pytest.mark.parametrize("path", ["layers.0.linear1", "layers.1.self_attn", "layers.1.norm2", "layers.0.dropout"])
def test_one_site_below_is_enough(runs, path):
    model = encoder().eval()
    site = put(model.get_submodule(path), "mixed_bfloat16")
    turn_off(model, {site})
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    for module in model.modules():
        if module is not site and list(module.parameters(recurse=False)):
            put(module, "keep")
    with torch.no_grad():
        model(randn(2, 5, 8), src_key_padding_mask=padding)
    assert id(site) in runs


def test_layers_without_a_site_below_keep_their_fused_path():
    model = encoder().eval()
    site = put(model.layers[0].linear1, "float32")
    turn_off(model, {site})
    assert isinstance(model.layers[0], Carried)
    assert type(model.layers[1]) is nn.TransformerEncoderLayer
    assert fused_calls(model, randn(2, 5, 8)) == 1


def test_values_are_those_of_training_mode():
    model = put_on_all(encoder(), "mixed_bfloat16")
    x = randn(2, 5, 8)
    expected = model(x)
    with torch.no_grad():
        got = model.eval()(x)
    # PyTorch's attention has a fused path of its own, which rounds at other places.
    assert (got.float() - expected.float()).abs().max() <= 24 * 2.0**-8


def test_taking_the_policy_away_turns_the_fused_path_on_again():
    model = encoder().eval()
    site = put(model.layers[0].linear1, "float32")
    turn_off(model, {site})
    scheme.commit(scheme.find(get("float32"), "linear").undo(site))
    turn_off(model, set())
    assert not any(isinstance(module, Carried) for module in model.modules())
    assert fused_calls(model, randn(2, 5, 8)) == 2


def test_dequantizing_turns_the_fused_path_on_again():
    model = apply(encoder().eval(), {"layers/0/linear1": "int8"})
    assert fused_calls(model, randn(2, 5, 8)) == 1
    assert fused_calls(dequantize(model), randn(2, 5, 8)) == 2


def test_change_that_is_planned_for_a_layer_is_altered_and_not_doubled():
    model = encoder(num_layers=1)
    layer = model.layers[0]
    planned = scheme.Change.of(layer)
    further = fused.changes_for(layer, {layer.linear1}, [planned])
    assert further == []
    assert issubclass(planned.new_class, Carried)


def test_layer_that_gets_a_policy_itself_needs_no_further_change():
    model = encoder(num_layers=1)
    layer = model.layers[0]
    planned = scheme.find(get("float32"), "container").prepare(layer, get("float32"))
    assert fused.changes_for(layer, {layer, layer.linear1}, planned) == []


def test_own_value_of_the_attribute_is_kept_beside_the_answer():
    layer = encoder(num_layers=1).layers[0]
    turn_off(layer, {layer.linear1})
    assert layer.activation_relu_or_gelu == 0
    layer.activation_relu_or_gelu = 2
    assert layer.activation_relu_or_gelu == 0
    assert vars(layer)["activation_relu_or_gelu"] == 2


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_stay_off_the_fused_path(clone):
    model = put_on_all(encoder(), "mixed_bfloat16").eval()
    assert fused_calls(clone(model), randn(2, 5, 8)) == 0


def test_subclass_of_an_encoder_layer_is_covered():
    class Residual(nn.TransformerEncoderLayer):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs) + 1

    layer = Residual(8, 2, 16, batch_first=True).eval()
    turn_off(layer, {layer.linear2})
    assert fused_calls(layer, randn(2, 5, 8)) == 0


@pytest.mark.parametrize("requires_grad", [True, False])
def test_full_graph_compile_takes_the_same_path(requires_grad):
    layer = put_on_all(encoder(num_layers=1).layers[0], "mixed_bfloat16").eval()
    x = randn(2, 5, 8)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.set_grad_enabled(requires_grad):
        assert compiled(x).dtype is torch.bfloat16
        # PyTorch's attention rounds at other places under tracing.
        assert (compiled(x).float() - layer(x).float()).abs().max() <= 24 * 2.0**-8
