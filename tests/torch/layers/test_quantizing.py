"""`quantize`: all layers that can carry a mode, or those that filters choose; whole or not at all; a report."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import narrowcast
from narrowcast.errors import LayerError, UnsupportedError, WeightError
from narrowcast.layers import (
    Conv2D,
    Dense,
    Dropout,
    EinsumDense,
    Embedding,
    LayerNormalization,
    ReversibleEmbedding,
    Sequential,
)
from narrowcast.plan.carrier import Status
from tests.torch.layers.models import block, floats, ids, policies, transformer
from tests.torch.layers.peer import assert_same, keras, twins, weights_of


def built(layer, shape=(None, 16)):
    layer.build(shape)
    return layer


def test_every_layer_that_can_is_quantized_from_the_policy_it_has():
    model = transformer(1, 32, dtype="mixed_bfloat16")
    model.quantize("int8")
    found = policies(model)
    assert found["0"] == found["1/attention/query"] == found["1/up"] == "int8_from_mixed_bfloat16"
    assert found["1/attention_norm"] == found["1"] == "mixed_bfloat16"


def test_the_report_says_what_was_quantized_what_was_not_and_why():
    report = transformer(1, 32).quantize("int8")
    assert report["1/up"].status is Status.APPLIED
    assert (report["1/attention_norm"].status, report["1/attention_norm"].reason) == (
        Status.NOT_A_TARGET,
        "int8 does not exist for a norm layer",
    )
    assert "int8_from_float32" in str(report)


def test_modules_of_pytorch_below_a_layer_are_quantized_too():
    model = Sequential([nn.Linear(16, 16), Dense(16)])
    model.build((None, 16))
    model.quantize("int8")
    assert model[0].dtype_policy.name == "int8_from_float32"


@pytest.mark.parametrize("filters", ["up", ["up"], lambda layer: layer.path == "up"])
def test_filters_choose_layers(filters):
    layer = block(16, inputs=16)
    layer.quantize("int8", filters=filters)
    assert [path for path, name in policies(layer).items() if name.startswith("int8")] == ["up"]


def test_a_filter_matches_the_whole_path():
    model = Sequential([Dense(16) for _ in range(11)])
    model.build((None, 16))
    model.quantize("int8", filters="1")
    assert [path for path, name in policies(model).items() if name.startswith("int8")] == ["1"]


def test_a_filter_chooses_modules_of_pytorch_by_their_paths_too():
    model = Sequential([Dense(16), nn.Linear(16, 16), nn.Linear(16, 16)])
    model.build((None, 16))
    model.quantize("int8", filters="[01]")
    assert model[0].quantization_mode == model[1].dtype_policy.quantization_mode == "int8"
    assert type(model[2]) is nn.Linear


def test_a_function_decides_about_modules_of_pytorch_by_the_layer_that_holds_them():
    outer = Sequential([Sequential([nn.Linear(16, 16)]), Sequential([nn.Sequential(nn.Linear(16, 16))])])
    outer.build((None, 16))
    outer.quantize("int8", filters=lambda layer: layer.path == "1")
    assert type(outer[0][0]) is nn.Linear
    assert outer[1][0][0].dtype_policy.quantization_mode == "int8"


def test_a_filter_may_leave_out_a_layer_that_stands_in_two_places():
    shared = Dense(16)
    model = Sequential([shared, Sequential([shared, Dense(16)])])
    model.build((None, 16))
    model.quantize("int8", filters="1/1")
    assert (shared.quantization_mode, model[1][1].quantization_mode) == (None, "int8")


@pytest.mark.parametrize("path", ["0", "1/0"])
def test_a_filter_chooses_a_layer_that_stands_in_two_places_by_each_of_its_paths(path):
    shared = Dense(16)
    model = Sequential([shared, Sequential([shared, Dense(16)])])
    model.build((None, 16))
    model.quantize("int8", filters=path)
    assert (shared.quantization_mode, model[1][1].quantization_mode) == ("int8", None)


def test_a_filter_may_leave_out_a_table_with_a_tied_head():
    model = Sequential([ReversibleEmbedding(9, 16), Dense(16)])
    model(torch.tensor([[1, 2]]))
    model.quantize("int8", filters="1")
    assert (model[0].quantization_mode, model[1].quantization_mode) == (None, "int8")


def test_a_filter_that_matches_no_layer_is_an_error_that_suggests_one():
    layer = block(16, inputs=16)
    with pytest.raises(LayerError, match=r"Filter 'upp' matches no layer of Block at ''.*did you mean 'up'"):
        layer.quantize("int8", filters=["up", "upp"])
    assert layer.up.quantization_mode is None


@pytest.mark.parametrize("filters", [3, [3], {"a": 1}])
def test_filters_that_are_none_are_an_error(filters):
    with pytest.raises(LayerError, match="Filters of layers are not usable"):
        built(Dense(16)).quantize("int8", filters=filters)


def test_a_filter_that_is_no_expression_is_an_error():
    with pytest.raises(LayerError, match="Filter of layers is not usable"):
        built(Dense(16)).quantize("int8", filters="(")


def test_quantizing_again_in_the_same_mode_changes_nothing():
    layer = built(Dense(16))
    layer.quantize("int8")
    codes = layer.core.weight_codes
    layer.quantize("int8")
    assert layer.core.weight_codes is codes


def test_finishing_a_model_of_which_a_part_is_quantized_works():
    layer = block(16, inputs=16)
    layer.up.quantize("int8")
    layer.quantize("int8")
    assert policies(layer)["native/1"] == "int8_from_float32"


def test_another_mode_over_a_quantized_layer_is_refused_before_any_change():
    layer = block(16, inputs=16)
    layer.up.quantize("int8")
    with pytest.raises(LayerError, match="Dense at 'up' is quantized already"):
        layer.quantize("int8/weight")
    assert policies(layer)["native/1"] == "float32"


def test_a_layer_that_is_not_built_is_refused_before_any_change():
    model = Sequential([built(Dense(16)), Dense(16)])
    with pytest.raises(LayerError, match="Dense at '1' is not built, so it cannot be quantized"):
        model.quantize("int8")
    assert model[0].dtype_policy.name == "float32"


def test_an_unknown_mode_is_an_error():
    with pytest.raises(narrowcast.errors.PolicyError, match="Quantization mode is unknown"):
        built(Dense(16)).quantize("int9")


@pytest.mark.parametrize("layer", [LayerNormalization(), Dropout(0.5)])
def test_a_layer_without_the_mode_says_so(layer):
    built(layer)
    with pytest.raises(UnsupportedError, match="Nothing in .* can be quantized in mode 'int8'"):
        layer.quantize("int8")


def test_weights_that_are_not_finite_are_refused_and_nothing_is_changed():
    model = Sequential([Dense(16), Dense(16)])
    model.build((None, 16))
    with torch.no_grad():
        model[1].core.weight[0, 0] = torch.nan
    with pytest.raises(WeightError, match="Layer '1' cannot .* holds NaN or infinity"):
        model.quantize("int8")
    assert model[0].dtype_policy.name == "float32"


def test_there_is_one_copy_of_the_weights_afterwards():
    layer = built(Dense(16))
    old = weakref.ref(layer.core.weight)
    layer.quantize("int8")
    gc.collect()
    assert old() is None
    assert sorted(layer.state_dict()) == ["core.bias", "core.weight_codes", "core.weight_scale"]


def test_the_kernel_reads_as_what_the_codes_stand_for():
    layer = built(Dense(16))
    before = layer.kernel.detach().clone()
    layer.quantize("int8")
    # Half a step of 127 for each column.
    assert ((layer.kernel - before).abs() <= before.abs().amax(0) / 254 * 1.001).all()


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_scales_are_float32_and_int8_computes_in_every_dtype(dtype):
    layer = built(Dense(16, dtype=dtype))
    layer.quantize("int8")
    assert layer.core.weight_scale.dtype is torch.float32
    assert layer(floats(2, 16)).dtype is getattr(torch, layer.compute_dtype)


def test_a_table_has_a_scale_for_each_row():
    layer = Embedding(3, 64)
    layer.build()
    with torch.no_grad():
        layer.core.weight.copy_(floats(3, 64) * torch.tensor([[1.0], [100.0], [1e-3]]))
    before = layer.embeddings.detach().clone()
    layer.quantize("int8")
    # Half a step of 127 of each row's own largest magnitude.
    assert ((layer.embeddings - before).abs() <= before.abs().amax(1, keepdim=True) / 254 * 1.001).all()


def test_a_table_and_its_reverse_are_quantized_as_one():
    layer = ReversibleEmbedding(32, 16)
    layer.build()
    layer.quantize("int8")
    assert layer.head.weight_codes is layer.core.weight_codes
    x = floats(2, 16)
    # 8-bit activations: half a step of 127 of each row, summed over 16 columns.
    torch.testing.assert_close(layer(x, reverse=True), x @ layer.embeddings.t(), atol=16 * 0.05 * 0.01, rtol=0)


@pytest.mark.parametrize(
    "equation, shape, output",
    [
        ("abc,cde->abde", (2, 3, 16), (None, 4, 8)),
        ("abcd,cde->abe", (2, 3, 4, 8), (None, 16)),
        ("...x,xy->...y", (2, 3, 16), 16),
        ("ab...,bc->ac...", (2, 16, 3), 16),
        ("abc,bd->acd", (2, 16, 3), (3, 16)),
    ],
)
def test_every_equation_has_its_scales_over_what_it_sums(equation, shape, output):
    layer = EinsumDense(equation, output)
    x = floats(*shape)
    exact = layer(x)
    layer.quantize("int8")
    # Weights and activations each within half a step of 127, over 16 to 32 terms that partly cancel.
    assert (layer(x) - exact).abs().max() <= 0.03 * exact.abs().max()


def test_an_equation_that_is_no_matrix_multiplication_stays_as_it_is():
    model = Sequential([EinsumDense("abc,bcd->abd", (4, 16)), Dense(16)])
    model.build((None, 4, 16))
    report = model.quantize("int8")
    assert (report["0"].status, model[0].dtype_policy.name) == (Status.NOT_A_TARGET, "float32")


def test_a_convolution_is_covered():
    layer = Conv2D(8, 3)
    x = floats(1, 6, 6, 3)
    exact = layer(x)
    layer.quantize("int8/weight")
    assert (layer(x) - exact).abs().max() <= 0.02 * exact.abs().max()


def test_a_subclass_with_a_call_of_its_own_computes_what_its_author_wrote():
    class Doubled(Dense):
        def call(self, inputs):
            return 2 * super().call(inputs)

    layer = built(Doubled(16))
    x = floats(4, 16)
    exact = layer(x)
    layer.quantize("int8")
    assert (layer(x) - exact).abs().max() <= 0.03 * exact.abs().max()


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras' own, with NumPy 2
def test_codes_and_outputs_are_those_of_keras():
    x = floats(4, 16)
    mine, theirs = twins(lambda layers, dtype: layers.Dense(16, dtype=dtype), x)
    theirs.quantize("int8")
    mine.quantize("int8")
    assert torch.equal(mine.core.weight_codes.t(), theirs._kernel.value)
    # The same integers; scales multiplied here and divided by there: a few roundings of float32.
    assert_same(mine(x), theirs(x), 2**-24, 16)
    assert len(weights_of(theirs)) == 3
    assert keras.backend.backend() == "torch"


def test_a_model_in_which_everything_is_quantized_stays_close():
    model = transformer(2, 32)
    exact = model(ids())
    model.quantize("int8")
    cosine = torch.nn.functional.cosine_similarity(model(ids()).flatten(), exact.flatten(), dim=0)
    assert cosine > 0.99


def test_what_was_trained_in_float8_is_frozen_with_the_scales_of_training():
    layer = Dense(8, dtype="float8_from_mixed_bfloat16")
    layer.build((None, 16))
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    layer(floats(4, 16)).float().square().sum().backward()
    optimizer.step()
    layer.eval()
    with torch.no_grad():
        expected = layer(floats(4, 16))
    scale = layer.core.float8_scale[0].item()
    layer.quantize("float8/static")
    assert layer.dtype_policy.name == "float8/static_from_mixed_bfloat16"
    assert torch.equal(layer(floats(4, 16)), expected)
    assert layer.core.float8_input_scale.tolist() == [scale]
