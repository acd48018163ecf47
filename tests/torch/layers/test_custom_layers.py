"""Layers of users' own: variables, `build`, `call`, what a layer keeps track of."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from narrowcast.errors import LayerError, UnsupportedError
from narrowcast.layers import BatchNormalization, Dense, Layer
from narrowcast.torch.layers.initializers import RandomNormal
from tests.torch.layers.models import Scale, floats


def layer_of(call, make=lambda self, shape: None, **kwargs):
    class Custom(Layer):
        def build(self, input_shape):
            make(self, input_shape)

        def call(self, inputs):
            return call(self, inputs)

    return Custom(**kwargs)


def test_a_variable_is_a_parameter_by_the_name_of_its_attribute():
    layer = Scale()
    layer.build((None, 3))
    assert list(layer.state_dict()) == ["early", "late"]
    assert isinstance(layer.late, nn.Parameter)


def test_a_variable_that_is_assigned_to_nothing_is_kept_under_its_label():
    layer = layer_of(lambda self, x: x * self.gain, lambda self, shape: self.add_weight(shape=(), name="gain"))
    layer(floats(2, 3))
    assert list(layer.state_dict()) == ["gain"]


def test_two_variables_of_one_label_are_both_kept():
    def make(self, shape):
        self.add_weight(shape=(), name="w")
        self.add_weight(shape=(), name="w")

    layer = layer_of(lambda self, x: x, make)
    layer(floats(2, 3))
    assert list(layer.state_dict()) == ["w", "w_1"]


def test_variables_in_a_list_are_kept_and_cast():
    def make(self, shape):
        self.gains = [self.add_weight(shape=(shape[-1],), initializer="ones") for _ in range(2)]

    layer = layer_of(lambda self, x: x * self.gains[0] + self.gains[1], make, dtype="mixed_bfloat16")
    assert layer(floats(2, 3)).dtype is torch.bfloat16
    assert list(layer.state_dict()) == ["gains.0", "gains.1"]


def test_layers_in_lists_tuples_and_dicts_are_tracked():
    layer = Layer()
    layer.listed, layer.tupled, layer.named = [Dense(1)], (Dense(1), Dense(1)), {"a": Dense(1)}
    assert [x.path for x in layer._flatten_layers()] == ["", "listed/0", "tupled/0", "tupled/1", "named/a"]


def test_a_list_of_other_things_stays_a_list():
    layer = Layer()
    layer.sizes = [1, 2]
    layer.mixed = [Dense(1), None]
    assert (layer.sizes, type(layer.mixed)) == ([1, 2], list)


def test_a_variable_has_the_variable_dtype_and_is_seen_in_the_compute_dtype():
    seen = []
    layer = layer_of(
        lambda self, x: seen.append(self.w.dtype) or x * self.w,
        lambda self, shape: setattr(self, "w", self.add_weight(shape=())),
        dtype="mixed_bfloat16",
    )
    layer(floats(2, 3))
    assert (layer.w.dtype, seen) == (torch.float32, [torch.bfloat16])


def test_a_variable_with_autocast_off_is_seen_as_it_is_stored():
    seen = []

    def make(self, shape):
        self.w = self.add_weight(shape=(), autocast=False)

    layer = layer_of(lambda self, x: seen.append(self.w.dtype) or x, make, dtype="mixed_bfloat16")
    layer(floats(2, 3))
    assert seen == [torch.float32]


def test_a_layer_with_autocast_off_sees_everything_as_it_is():
    seen = []
    layer = layer_of(
        lambda self, x: seen.append((x.dtype, self.w.dtype)) or x,
        lambda self, shape: setattr(self, "w", self.add_weight(shape=())),
        dtype="mixed_bfloat16",
        autocast=False,
    )
    layer(floats(2, 3))
    assert seen == [(torch.float32, torch.float32)]


def test_a_dtype_of_its_own_is_that_of_storage_and_is_cast_all_the_same():
    seen = []

    def make(self, shape):
        self.w = self.add_weight(shape=(), dtype="float64")

    layer = layer_of(lambda self, x: seen.append(self.w.dtype) or x, make, dtype="mixed_bfloat16")
    layer(floats(2, 3))
    assert (layer.w.dtype, seen) == (torch.float64, [torch.bfloat16])


def test_a_dtype_of_its_own_survives_conversions_of_the_layer():
    layer = layer_of(lambda self, x: x, lambda self, shape: setattr(self, "w", self.add_weight((), dtype="float64")))
    layer(floats(2, 3))
    layer.half()
    layer.dtype_policy = "bfloat16"
    layer.load_state_dict(layer.state_dict())
    assert layer.w.dtype is torch.float64


def test_whole_numbers_are_variables_too():
    layer = layer_of(lambda self, x: x, lambda self, shape: setattr(self, "n", self.add_weight((), dtype="int32")))
    layer(floats(2, 3))
    assert (layer.n.dtype, layer.n.item(), layer.n.requires_grad) == (torch.int32, 0, False)


def test_a_variable_that_is_not_trainable_gets_no_gradient_whatever_the_layer_is():
    layer = layer_of(lambda self, x: x, lambda self, shape: setattr(self, "w", self.add_weight((), trainable=False)))
    layer(floats(2, 3))
    layer.trainable = True
    assert not layer.w.requires_grad


def test_a_layer_that_is_not_trainable_freezes_its_variables_and_those_below():
    layer = Scale(trainable=False)
    layer(floats(2, 3))
    assert not any(p.requires_grad for p in layer.parameters())
    layer.trainable = True
    assert all(p.requires_grad for p in layer.parameters())


def test_initial_values_are_those_of_the_seed():
    make = lambda self, shape: setattr(self, "w", self.add_weight((4,), RandomNormal(seed=3)))  # noqa: E731
    first, second = layer_of(lambda self, x: x, make), layer_of(lambda self, x: x, make)
    first(floats(1)), second(floats(1))
    assert torch.equal(first.w, second.w)


def test_without_a_seed_torch_s_own_decides():
    def values(seed):
        torch.manual_seed(seed)
        layer = Dense(3)
        layer.build((None, 3))
        return layer.kernel

    assert torch.equal(values(1), values(1))
    assert not torch.equal(values(1), values(2))


def test_attributes_that_call_sets_are_kept():
    layer = layer_of(
        lambda self, x: setattr(self, "calls", getattr(self, "calls", 0) + 1) or x * self.w,
        lambda self, shape: setattr(self, "w", self.add_weight(())),
        dtype="mixed_bfloat16",
    )
    layer(floats(2, 3)), layer(floats(2, 3))
    assert layer.calls == 2


def test_what_an_author_calls_his_methods_does_not_matter():
    class Own(Layer):
        def call(self, x):
            return self._run(x) + self._call(x) + self._narrow(x)

        def _run(self, x):
            return x

        _call = _narrow = _run

    assert Own(dtype="mixed_bfloat16")(torch.ones(2)).tolist() == [3, 3]


def test_a_subclass_that_reads_the_kernel_gets_it_in_the_compute_dtype():
    class Own(Dense):
        def call(self, inputs):
            return inputs @ self.kernel + self.bias

    layer = Own(3, dtype="mixed_bfloat16")
    x = floats(2, 4)
    assert layer(x).dtype is torch.bfloat16
    assert layer.kernel.dtype is torch.float32
    # One product and one sum rounded to bfloat16 here, their result rounded once in the core.
    torch.testing.assert_close(layer(x), layer.core(x), atol=2**-6, rtol=2**-7)


def test_a_subclass_that_reads_the_kernel_of_a_quantized_layer_gets_what_it_stands_for():
    class Own(Dense):
        def call(self, inputs):
            return inputs @ self.kernel

    layer = Own(16, use_bias=False)
    layer.build((None, 16))
    layer.quantize("int8")
    x = floats(2, 16)
    assert torch.equal(layer(x), x @ layer.kernel)


def test_threads_see_a_layer_whole():
    layer = Scale(dtype="mixed_bfloat16")
    layer(floats(2, 64))
    wrong = []

    def work():
        for _ in range(100):
            if layer(floats(2, 64)).dtype is not torch.bfloat16 or layer.late.dtype is not torch.float32:
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# Building


def test_a_layer_is_built_by_its_first_call():
    layer = Scale()
    assert not layer.built
    layer(floats(2, 5))
    assert (layer.built, layer.late.shape) == (True, (5,))


def test_a_layer_is_built_once():
    calls = []
    layer = layer_of(lambda self, x: x, lambda self, shape: calls.append(shape))
    layer(floats(2, 5)), layer.build((None, 5)), layer(floats(3, 5))
    assert calls == [(2, 5)]


def test_a_build_that_calls_that_of_its_base_works():
    class Own(Dense):
        def build(self, input_shape):
            super().build(input_shape)
            self.extra = self.add_weight(shape=(self.units,), initializer="ones")

        def call(self, inputs):
            return super().call(inputs) * self.extra

    layer = Own(3)
    layer(floats(2, 4))
    assert list(layer.state_dict()) == ["extra", "core.weight", "core.bias"]


def test_a_build_with_several_shapes_gets_those_of_the_arguments_of_their_names():
    class Two(Layer):
        def build(self, first_shape, second_shape):
            self.shapes = first_shape, second_shape

        def call(self, first, second):
            return first

    layer = Two()
    layer(floats(2, 3), second=floats(4, 5))
    assert layer.shapes == ((2, 3), (4, 5))


def test_a_build_gets_the_shapes_of_a_structure():
    class Add(Layer):
        def build(self, input_shape):
            self.shapes = input_shape

        def call(self, inputs):
            return inputs[0] + inputs[1]

    layer = Add()
    layer([floats(2, 3), floats(2, 3)])
    assert layer.shapes == [(2, 3), (2, 3)]


def test_an_argument_of_build_without_one_of_call_is_an_error():
    class Odd(Layer):
        def build(self, first_shape, other_shape):
            pass

        def call(self, first, second):
            return first

    with pytest.raises(LayerError, match="'other_shape' of a layer's `build` belongs to no argument"):
        Odd()(floats(1), floats(1))


def test_a_layer_of_layers_without_a_build_builds_them_by_a_shape():
    class Two(Layer):
        def __init__(self):
            super().__init__()
            self.first, self.second = Dense(4), Dense(2)

        def call(self, x):
            return self.second(self.first(x))

    layer = Two()
    layer.build((None, 3))
    assert (layer.first.kernel.shape, layer.second.kernel.shape) == ((3, 4), (4, 2))


def test_building_by_a_shape_leaves_the_mode_of_training():
    class Two(Layer):
        def __init__(self):
            super().__init__()
            self.first, self.second = Dense(4), Dense(2).eval()

        def call(self, x):
            return self.second(self.first(x))

    layer = Two()
    layer.build((None, 3))
    assert (layer.training, layer.first.training, layer.second.training) == (True, True, False)


def test_a_build_that_fails_can_be_tried_again():
    def make(self, shape):
        self.w = self.add_weight(shape=(shape[-1],))
        if shape[-1] == 1:
            raise RuntimeError("no")

    layer = layer_of(lambda self, x: x, make)
    with pytest.raises(RuntimeError, match="no"):
        layer(floats(2, 1))
    layer(floats(2, 3))
    assert layer.w.shape == (3,)


@pytest.mark.parametrize("shape", [(None, "3"), 3, (None, -1), (None, 2.5), (None, True)])
def test_a_shape_that_is_none_is_an_error(shape):
    with pytest.raises(LayerError, match="Shape to build a layer with is not a shape"):
        Dense(2).build(shape)


@pytest.mark.parametrize("shape", [(None, None), (), None])
def test_a_length_that_must_be_known_and_is_not_is_an_error(shape):
    with pytest.raises(LayerError, match="Dense at '' cannot be built"):
        Dense(2).build(shape)


def test_a_variable_of_unknown_shape_is_an_error():
    layer = layer_of(lambda self, x: x, lambda self, shape: self.add_weight(shape=(None, 3), name="w"))
    with pytest.raises(LayerError, match="Variable 'w' cannot be made: its shape is not known"):
        layer(floats(2, 3))


def test_a_variable_after_building_is_an_error():
    layer = Scale()
    layer.build((None, 3))
    with pytest.raises(LayerError, match="is built already, so it makes no more variables"):
        layer.add_weight(shape=())


def test_a_name_in_the_place_of_a_shape_is_an_error():
    with pytest.raises(LayerError, match="Give its name as `name=`"):
        Layer().add_weight("kernel")


def test_a_constraint_says_what_to_use():
    with pytest.raises(UnsupportedError, match="torch.nn.utils.parametrize"):
        Layer().add_weight((), constraint="non_neg")


def test_an_initializer_that_returns_another_shape_is_an_error():
    layer = layer_of(lambda self, x: x, lambda self, s: self.add_weight((2,), lambda shape, dtype: torch.ones(3)))
    with pytest.raises(LayerError, match="returns another shape"):
        layer(floats(1))


def test_a_layer_without_a_call_says_so():
    with pytest.raises(NotImplementedError, match="Layer has no `call` method"):
        Layer()(floats(1))


def test_a_name_with_a_slash_is_an_error():
    with pytest.raises(LayerError, match="text without a '/'"):
        Dense(2, name="a/b")


def test_reading_a_variable_of_a_layer_that_is_not_built_says_so():
    with pytest.raises(AttributeError, match="Dense is not built, so it has no 'kernel' yet"):
        Dense(2).kernel  # noqa: B018


def test_counting_the_variables_of_a_layer_that_is_not_built_says_so():
    with pytest.raises(LayerError, match="is not built"):
        Dense(2).count_params()


def test_weights_are_listed_in_the_order_of_keras():
    layer = Scale()
    layer.build((None, 3))
    assert [w.shape for w in layer.weights] == [(), (3,)]
    assert (layer.count_params(), len(layer.trainable_weights), layer.non_trainable_weights) == (4, 2, [])


def test_variables_have_the_names_of_keras_too():
    layer = BatchNormalization()
    layer.build((None, 3))
    assert [id(v) for v in layer.variables] == [id(v) for v in layer.weights]
    assert [id(v) for v in layer.trainable_variables] == [id(layer.core.weight), id(layer.core.bias)]
    assert [id(v) for v in layer.non_trainable_variables] == [id(v) for v in layer.non_trainable_weights]


def test_weights_are_set_from_arrays_of_their_shapes():
    layer = Dense(2)
    layer.build((None, 3))
    layer.set_weights([floats(3, 2), torch.ones(2).numpy()])
    assert torch.equal(layer.kernel, floats(3, 2))
    assert layer.bias.tolist() == [1, 1]


def test_weights_of_another_shape_are_refused_and_nothing_is_set():
    layer = Dense(2)
    layer.build((None, 3))
    before = layer.kernel.clone()
    with pytest.raises(LayerError, match="Value for 'bias' of Dense at '' has another shape"):
        layer.set_weights([floats(3, 2), floats(3)])
    assert torch.equal(layer.kernel, before)


def test_another_number_of_weights_is_refused():
    layer = Dense(2)
    layer.build((None, 3))
    with pytest.raises(LayerError, match="Expected 2: kernel, bias"):
        layer.set_weights([floats(3, 2)])


def test_the_kernel_of_a_quantized_layer_is_not_set():
    layer = Dense(16)
    layer.build((None, 16))
    layer.quantize("int8")
    with pytest.raises(LayerError, match="Set the values first and quantize then"):
        layer.kernel = floats(16, 16)
