"""Layers are ordinary modules: everything of PyTorch that takes modules takes them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowcast
from narrowcast.layers import Dense, Dropout, Layer, MultiHeadAttention, Sequential
from tests.torch.layers.models import Scale, block, floats, ids, transformer

COMPILER_WARNINGS = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


class Wrapper(Layer):
    """A layer whose `call` has no argument for training."""

    def __init__(self, layers, **kwargs):
        super().__init__(**kwargs)
        self.inner = layers

    def call(self, inputs):
        for layer in self.inner:
            inputs = layer(inputs)
        return inputs


def test_an_optimizer_trains_them():
    layer = block()
    optimizer = torch.optim.AdamW(layer.parameters(), 0.01)
    x, target = floats(32, 4), floats(32, 8, seed=2)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (layer(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_a_state_dict_goes_from_one_to_another():
    first, second = block(seed=0), block(seed=1)
    second.load_state_dict(first.state_dict())
    assert torch.equal(second(floats(2, 4)), first(floats(2, 4)))


def test_hooks_run_once_a_call_and_see_what_comes_and_goes():
    layer = block()
    seen = []
    layer.up.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    layer.up.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    layer(floats(2, 4))
    assert seen == [(2, 4), (2, 8)]


def test_a_hook_sees_the_first_call_too():
    layer, seen = Dense(2), []
    layer.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    layer(floats(2, 3))
    assert seen == [(2, 2)]


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16", "int8_from_float32"])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_a_copy_computes_the_same_and_is_independent(dtype, copied):
    layer = block(16, dtype=dtype)
    again = copied(layer)
    x = floats(2, 4)
    assert torch.equal(again(x), layer(x))
    with torch.no_grad():
        again.scale.late.zero_()
    assert layer.scale.late.any()


def test_a_layer_that_is_not_built_can_be_copied():
    layer = copy.deepcopy(Dense(2))
    assert layer(floats(1, 3)).shape == (1, 2)


def test_it_is_built_where_its_input_is():
    layer = Dense(2)
    layer(torch.empty(1, 3, device="meta"))
    assert layer.core.weight.device.type == "meta"


def test_it_moves_to_another_device():
    layer = block().to("meta")
    assert {p.device.type for p in layer.parameters()} == {"meta"}


def test_a_policy_is_not_overruled_by_half():
    layer = block().half()
    assert layer(floats(2, 4)).dtype is torch.float32


def test_a_policy_is_not_overruled_by_autocast():
    layer = block()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(floats(2, 4)).dtype is torch.float32


def test_modules_of_pytorch_hold_layers_and_layers_hold_modules():
    net = nn.Sequential(Dense(4), nn.ReLU(), Sequential([nn.Linear(4, 3), Dense(2)]))
    assert net(floats(2, 5)).shape == (2, 2)
    assert [name for name, _ in net.named_parameters()] == [
        "0.core.weight",
        "0.core.bias",
        "2.0.weight",
        "2.0.bias",
        "2.1.core.weight",
        "2.1.core.bias",
    ]


def test_apply_reaches_modules_within_layers():
    layer = block(16, inputs=16)
    narrowcast.apply(layer, {"native/1": "int8"})
    assert layer.native[1].dtype_policy.name == "int8_from_float32"


def test_a_plan_names_a_layer_once_by_its_kind():
    tree = narrowcast.tree(block())
    assert [(s.path, s.kind) for s in tree][:3] == [("", "container"), ("up", "linear"), ("scale", "other")]
    assert "up/core" not in tree


def test_a_layer_that_is_not_built_is_refused_by_a_plan_with_what_to_do():
    with pytest.raises(narrowcast.errors.PlanError, match="build it, or run one batch"):
        narrowcast.plan(Dense(2), {"": "bfloat16"})


def test_dequantize_brings_layers_back():
    layer = block(16, inputs=16)
    layer.quantize("int8")
    narrowcast.dequantize(layer)
    assert layer.up.dtype_policy.name == "float32"
    assert isinstance(layer.up.core.weight, nn.Parameter)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_gives_the_same_gradients(use_reentrant):
    layer = Sequential([block(dtype="mixed_bfloat16"), Dropout(0.5, seed=1), Dense(2)])
    layer.build((None, 4))
    x = floats(8, 4).requires_grad_()
    gradients = []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=use_reentrant)):
        layer[1]._num_drawn = 0
        layer.zero_grad()
        run(x).square().sum().backward()
        gradients.append([p.grad.clone() for p in layer.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


@COMPILER_WARNINGS
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_it_compiles_into_one_graph(dtype):
    model = transformer(1, dtype=dtype)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    # The same operators in the same order, but for what the tracer fuses of casts: one rounding of the compute dtype.
    torch.testing.assert_close(compiled(ids()), model(ids()), atol=2**-7, rtol=2**-7)


@COMPILER_WARNINGS
@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_layers_of_many_classes_compile_each_by_itself(dtype):
    # Dynamo compiles one function at most so many times; then it is an error, or eager in silence.
    torch._dynamo.reset()
    for number in range(torch._dynamo.config.recompile_limit + 2):
        cls = type(f"Layer{number}", (Layer,), {"call": lambda self, x, number=number: x + number})
        layer = cls(dtype=dtype)
        layer(torch.zeros(1))
        assert torch.compile(layer, fullgraph=True, backend="eager")(torch.zeros(1)) == number


@COMPILER_WARNINGS
def test_a_custom_layer_compiles_and_trains():
    layer = Scale(dtype="mixed_bfloat16")
    layer(floats(2, 3))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = floats(4, 3)
    compiled(x).sum().backward()
    gradient, layer.late.grad = layer.late.grad, None
    layer(x).sum().backward()
    assert torch.equal(layer.late.grad, gradient)


@COMPILER_WARNINGS
def test_a_quantized_model_compiles_into_one_graph():
    model = transformer(1, 32)
    model.quantize("int8")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    # Equal codes, and float32 sums in another order.
    torch.testing.assert_close(compiled(ids()), model(ids()), atol=1e-4, rtol=1e-4)


@COMPILER_WARNINGS
def test_compiling_before_building_says_what_to_do():
    with pytest.raises(Exception, match="Build it before compiling"):
        torch.compile(Dense(2), fullgraph=True, backend="eager")(floats(1, 3))


def test_training_follows_the_module():
    layer = Dropout(1.0)
    assert not layer(torch.ones(3)).any()
    assert layer.eval()(torch.ones(3)).all()


def test_training_can_be_said_in_the_call_and_goes_down_to_all_layers():
    model = Sequential([Dropout(1.0)])
    assert model(torch.ones(3), training=False).all()
    assert not model.eval()(torch.ones(3), training=True).any()


def test_training_said_in_one_call_does_not_stay():
    model = Sequential([Dropout(1.0)]).eval()
    model(torch.ones(3), training=True)
    assert model(torch.ones(3)).all()


@COMPILER_WARNINGS
@pytest.mark.parametrize("make", [Sequential, Wrapper, lambda layers: Wrapper([Wrapper(layers)])])
def test_training_said_to_a_compiled_layer_goes_down_too(make):
    torch._dynamo.reset()  # it compiles one function at most eight times
    model = make([Dropout(1.0)])
    model(torch.ones(3))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert compiled(torch.ones(3), training=False).all()
    assert not compiled(torch.ones(3)).any()
    model.eval()
    assert not compiled(torch.ones(3), training=True).any()
    assert compiled(torch.ones(3)).all()


def test_training_can_be_said_by_place():
    layer = MultiHeadAttention(2, 4, dropout=0.9, seed=1)
    x = floats(1, 4, 8)
    first = layer(x, x, None, None, None, None, None, False, False, True)
    assert torch.equal(layer.eval()(x, x, None, None, None, None, None, False, None, True), first)
    assert torch.equal(layer(x, x, training=False, use_causal_mask=True), first)


def test_training_said_to_a_layer_that_does_not_ask_is_passed_over():
    assert Dense(2)(floats(1, 3), training=True).shape == (1, 2)


def test_attention_drops_in_training_only():
    layer = MultiHeadAttention(2, 4, dropout=0.9, seed=1)
    x = floats(1, 4, 8)
    trained = layer(x, x)
    assert torch.equal(layer.eval()(x, x), layer(x, x))
    assert not torch.equal(layer(x, x), trained)


def test_gradients_reach_what_comes_before_a_quantized_layer():
    model = Sequential([Dense(16), Dense(16)])
    model.build((None, 16))
    model.quantize("int8", filters="1")
    model(floats(2, 16)).sum().backward()
    assert model[0].core.weight.grad.any()


@pytest.mark.parametrize("kind", ["sequential", "custom"])
def test_an_error_of_dtypes_names_the_modules_of_pytorch_that_carry_no_policy(kind):
    class Custom(Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.first, self.plain = Dense(3), nn.Linear(3, 2)

        def call(self, x):
            return self.plain(self.first(x))

    if kind == "custom":
        layer, path = Custom(dtype="mixed_bfloat16"), "plain"
    else:
        layer, path = Sequential([Dense(3), nn.Linear(3, 2)], dtype="mixed_bfloat16"), "1"
    with pytest.raises(RuntimeError, match="dtype") as caught:
        layer(torch.ones(2, 4))
    (note,) = [note for note in caught.value.__notes__ if "take no policy from the layer" in note]
    advice = f"narrowcast.apply(layer, {{{path!r}: 'mixed_bfloat16'}})"
    assert note.endswith(advice)
    narrowcast.apply(layer, {path: "mixed_bfloat16"})  # which is the advice
    assert layer(torch.ones(2, 4)).dtype is torch.bfloat16
