"""Reading Keras models: paths, policies, weights, live and from files."""

from __future__ import annotations

import json
import zipfile

import numpy
import pytest
import torch

import narrowcast
import narrowcast.keras
import narrowcast.layers
from narrowcast import saving
from narrowcast.dtype_policies import DTypePolicyMap
from narrowcast.errors import CheckpointError, ModelError, PathError, TreeMismatchError
from tests.keras.models import (
    RENAME,
    VOCABULARY,
    encoder_of_keras,
    encoder_of_ours,
    keras,
    mixed_of_keras,
    mixed_of_ours,
    token_ids,
)
from tests.torch.layers.peer import UNIT, assert_same, random_floats, weights_of

# What Keras itself warns of: NumPy 2, and layers that it cannot quantize.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method:UserWarning"),
    pytest.mark.filterwarnings("ignore:Invalid quantization mode:UserWarning"),
]


class Holder(narrowcast.layers.Layer):
    """A model of one layer."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, *args):
        return self.inner(*args)


@pytest.fixture(params=["live", "file"])
def source_of(request, tmp_path):
    """A Keras model as a source: itself, or a file of it."""

    def source(model):
        if request.param == "live":
            return model
        model.save(tmp_path / "model.keras")
        return tmp_path / "model.keras"

    return source


def test_layers_of_a_sequential_go_by_their_numbers(source_of):
    read = narrowcast.keras.read(source_of(mixed_of_keras()))
    assert [layer.path for layer in read.layers if layer.variables] == ["0", "1", "2", "4", "5", "6", "7"]


def test_layers_of_a_functional_model_go_by_their_names(source_of):
    paths = [layer.path for layer in narrowcast.keras.read(source_of(encoder_of_keras())).layers if layer.variables]
    assert {"token", "block/attention/query", "block/attention/attention_output", "block/up", "head"} <= set(paths)


def test_policies_become_a_map(source_of):
    policies = narrowcast.keras.policies_of(source_of(mixed_of_keras()))
    assert isinstance(policies, DTypePolicyMap)
    assert {path: policy.name for path, policy in policies.items()} == {"2": "mixed_bfloat16", "6": "float64"}
    assert policies.default_policy.name == "float32"


def test_the_map_goes_onto_a_model_of_ours():
    model = mixed_of_ours()
    narrowcast.apply(model, narrowcast.keras.policies_of(mixed_of_keras()))
    assert (model[2].dtype_policy.name, model[6].dtype_policy.name) == ("mixed_bfloat16", "float64")


def test_weights_of_every_class_load_with_equal_outputs(source_of):
    theirs = mixed_of_keras()
    rng = numpy.random.default_rng(0)
    theirs.set_weights([w + rng.normal(0, 0.1, w.shape) ** 2 for w in weights_of(theirs)])
    ours = saving.load_keras_weights(mixed_of_ours(), source_of(theirs))
    x = random_floats(2, 8, 6)
    # One layer in bfloat16, whose output passes two norms.
    assert_same(ours(x), theirs(x, training=False), UNIT["mixed_bfloat16"], 8)


LAYERS = {
    "an equation with a bias on one of two new axes": (
        lambda layers: layers.EinsumDense("abc,cde->abde", (None, 2, 4), bias_axes="e"),
        [(8, 6)],
    ),
    "an equation with a common axis": (
        lambda layers: layers.EinsumDense("abc,bcd->abd", (8, 4), bias_axes="d"),
        [(8, 6)],
    ),
    "a convolution over images": (lambda layers: layers.Conv2D(4, (3, 2), groups=2), [(8, 8, 6)]),
    "a norm without variables": (lambda layers: layers.LayerNormalization(center=False, scale=False), [(6,)]),
    "a norm with a beta alone": (lambda layers: layers.LayerNormalization(scale=False), [(6,)]),
    "a norm of batches without gamma and beta": (
        lambda layers: layers.BatchNormalization(center=False, scale=False),
        [(6,)],
    ),
    "attention with a gate": (lambda layers: layers.MultiHeadAttention(2, 4, use_gate=True), [(5, 6), (4, 6)]),
    "attention in groups": (
        lambda layers: (layers.GroupQueryAttention if layers is keras.layers else layers.GroupedQueryAttention)(
            4, 4, 2
        ),
        [(5, 6), (4, 6)],
    ),
}


@pytest.mark.parametrize("case", LAYERS)
def test_weights_of_every_form_of_a_layer_load_with_equal_outputs(source_of, case):
    make, shapes = LAYERS[case]
    theirs, ours = make(keras.layers), make(narrowcast.layers)
    inputs = [keras.Input(shape) for shape in shapes]
    model = keras.Model(inputs, theirs(*inputs))
    rng = numpy.random.default_rng(0)
    model.set_weights([rng.normal(0, 0.5, w.shape) ** 2 for w in weights_of(model)])
    x = [random_floats(2, *shape, seed=seed) for seed, shape in enumerate(shapes)]
    root = Holder(ours)
    root(*x)
    saving.load_keras_weights(root.eval(), source_of(model), rename={theirs.name: "inner"})
    # At most two products, a softmax and a norm in float32, sums of up to 36 terms.
    assert_same(root(*x), model(x if len(x) > 1 else x[0], training=False), UNIT["float32"], 256)


@pytest.mark.parametrize("mode", [None, "int8"])
def test_a_table_with_a_way_back_of_its_own_loads(source_of, mode):
    ids = keras.Input((5,), dtype="int32")
    theirs = keras.layers.ReversibleEmbedding(VOCABULARY, 8, tie_weights=False)
    model = keras.Model(ids, theirs(theirs(ids), reverse=True))
    expected = theirs.reverse_embeddings.value.clone()
    if mode:
        model.quantize(mode)
    ours = Holder(narrowcast.layers.ReversibleEmbedding(VOCABULARY, 8, tie_weights=False))
    ours(token_ids())
    saving.load_keras_weights(ours, source_of(model), rename={theirs.name: "inner"})
    # As it is, or half a step of 127 steps of the largest magnitude.
    atol = expected.abs().max().item() / 254 * 1.001 if mode else 0
    torch.testing.assert_close(ours.inner.reverse_embeddings, expected, atol=atol, rtol=0)


def test_variables_of_a_layer_that_the_config_of_a_file_does_not_name_are_refused(tmp_path):
    path = tmp_path / "model.keras"
    mixed_of_keras().save(path)
    _without_layer(path, "Dense")
    with pytest.raises(CheckpointError, match="holds variables of layers that its config does not name"):
        narrowcast.keras.read(path)


def _without_layer(path, class_name):
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    config = json.loads(parts["config.json"])
    layers = config["config"]["layers"]
    config["config"]["layers"] = [layer for layer in layers if layer["class_name"] != class_name]
    parts["config.json"] = json.dumps(config)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)


def test_a_transformer_of_other_paths_loads_with_equal_outputs(source_of):
    theirs = encoder_of_keras()
    ours = saving.load_keras_weights(encoder_of_ours(), source_of(theirs), rename=RENAME)
    ids = token_ids()
    # Attention, norms and three products in float32, sums of up to 32 terms.
    assert_same(ours(ids), theirs(ids, training=False), UNIT["float32"], 512)


def test_paths_may_be_renamed_by_a_function():
    theirs = encoder_of_keras()
    ours = encoder_of_ours()
    saving.load_keras_weights(ours, theirs, rename=lambda p: "/".join(RENAME.get(part, part) for part in p.split("/")))
    assert torch.equal(ours[3].kernel, theirs.get_layer("head").kernel.value)


@pytest.mark.parametrize("mode", ["int8", "float8"])
def test_quantized_weights_are_read_as_what_they_stand_for(source_of, mode):
    theirs = encoder_of_keras()
    before = {path: dict(v) for path, v in narrowcast.keras.weights_of(theirs).items()}
    theirs.quantize(mode)
    read = narrowcast.keras.weights_of(source_of(theirs))
    assert read.keys() == before.keys()
    for path, variables in before.items():
        for name, value in variables.items():
            # Half a step of 127 steps of the largest magnitude; float8 keeps its master weights.
            largest = abs(value).max() / 254 * 1.001 if mode == "int8" else 0
            numpy.testing.assert_allclose(read[path][name].reshape(value.shape), value, atol=largest + 1e-7)


def test_codes_of_int8_are_the_same_after_loading(source_of):
    theirs = encoder_of_keras()
    theirs.quantize("int8")
    ours = saving.load_keras_weights(encoder_of_ours(), source_of(theirs), rename=RENAME)
    ours.quantize("int8")
    codes = theirs.get_layer("head")._kernel.value.numpy()
    assert numpy.array_equal(ours[3].core.weight_codes.numpy().T, codes)
    query = theirs.get_layer("block").attention.query_dense._kernel.value.numpy()
    assert numpy.array_equal(ours[1].attention.query.core.weight_codes.numpy().T.reshape(query.shape), query)
    table = theirs.get_layer("token")._embeddings.value.numpy()
    assert numpy.array_equal(ours[0].core.weight_codes.numpy(), table)


def test_outputs_of_int8_are_those_of_keras():
    theirs = encoder_of_keras()
    theirs.quantize("int8")
    ours = saving.load_keras_weights(encoder_of_ours(), theirs, rename=RENAME)
    ours.quantize("int8")
    ids = token_ids()
    # The same codes of weights; an activation on the edge between two codes may fall to either side: one step of 127.
    assert_same(ours(ids), theirs(ids, training=False), 1 / 127, 2)


@pytest.mark.parametrize("block_size", [-1, 4, 128])
@pytest.mark.parametrize("use_bias", [True, False])
def test_kernels_of_int4_are_read_as_what_keras_makes_of_them(source_of, block_size, use_bias):
    theirs = keras.Sequential([keras.Input((10,)), keras.layers.Dense(7, use_bias=use_bias)])
    theirs.quantize("int4", config=keras.quantizers.Int4QuantizationConfig(block_size=block_size))
    layer = theirs.layers[0]
    read = narrowcast.keras.read(source_of(theirs))["0"]
    assert read.policy.name == f"int4/{block_size}_from_float32"
    assert read.variables["kernel"].shape == (10, 7)
    rows = torch.eye(10)
    expected = theirs(rows, training=False).detach().numpy() - (layer.bias.value.detach().numpy() if use_bias else 0)
    # The kernel is what comes out for the unit vectors, to float32.
    numpy.testing.assert_allclose(read.variables["kernel"], expected, atol=1e-6)


@pytest.mark.parametrize("block_size", [-1, 4])
def test_tables_of_int4_are_read_as_what_keras_makes_of_them(source_of, block_size):
    theirs = keras.Sequential([keras.Input((3,), dtype="int32"), keras.layers.Embedding(9, 6)])
    theirs.quantize("int4", config=keras.quantizers.Int4QuantizationConfig(block_size=block_size))
    read = narrowcast.keras.read(source_of(theirs))["0"]
    expected = theirs(torch.arange(9)[None], training=False)[0].detach().numpy()
    numpy.testing.assert_allclose(read.variables["embeddings"], expected, atol=1e-7)


@pytest.mark.parametrize("block_size", [-1, 4])
def test_ways_back_of_int4_are_read_as_what_keras_makes_of_them(source_of, block_size):
    ids = keras.Input((3,), dtype="int32")
    layer = keras.layers.ReversibleEmbedding(9, 6, tie_weights=False, name="table")
    theirs = keras.Model(ids, layer(layer(ids), reverse=True))
    theirs.quantize("int4", config=keras.quantizers.Int4QuantizationConfig(block_size=block_size))
    found = narrowcast.keras.read(source_of(theirs))["table"].variables["reverse_embeddings"]
    # It is what comes out for the unit vectors, to float32.
    numpy.testing.assert_allclose(found, layer(torch.eye(6), reverse=True).detach().numpy(), atol=1e-7)


@pytest.mark.parametrize("mode, block_size", [("int8", None), ("int4", None), ("int4", -1), ("int4", 4)])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("use_bias", [True, False])
def test_projections_of_attention_are_told_apart_by_their_shapes(tmp_path, mode, block_size, size, use_bias):
    # A file has no config of them, and a packed kernel is as wide as the bias here where there are two heads.
    inputs = keras.Input((5, 6))
    theirs = keras.Model(inputs, keras.layers.MultiHeadAttention(2, size, use_bias=use_bias)(inputs, inputs))
    config = None if block_size is None else keras.quantizers.Int4QuantizationConfig(block_size=block_size)
    theirs.quantize(mode, config=config)
    theirs.save(tmp_path / "model.keras")
    read, expected = (narrowcast.keras.read(source) for source in (tmp_path / "model.keras", theirs))
    for layer in expected:
        for name, value in layer.variables.items():
            numpy.testing.assert_allclose(read[layer.path].variables[name].reshape(value.shape), value, rtol=1e-6)


@pytest.mark.parametrize("block_size", [-1, 2, 4])
def test_the_length_of_groups_shows_in_a_file_without_configs(tmp_path, block_size):
    inputs = keras.Input((5, 6))
    theirs = keras.Model(inputs, keras.layers.MultiHeadAttention(2, 4, name="attention")(inputs, inputs))
    theirs.quantize("int4", config=keras.quantizers.Int4QuantizationConfig(block_size=block_size))
    theirs.save(tmp_path / "model.keras")
    read = narrowcast.keras.read(tmp_path / "model.keras")
    for name in ("query", "value", "attention_output"):
        assert read[f"attention/{name}"].policy.name == f"int4/{block_size}_from_float32"


def test_states_of_float8_are_read_as_they_are_stored(source_of):
    theirs = keras.Sequential([keras.Input((10,)), keras.layers.Dense(7)])
    theirs.quantize("float8")
    read = narrowcast.keras.read(source_of(theirs))["0"]
    assert read.policy.name == "float8_from_float32"
    assert read.stored["inputs_amax_history"].shape == (1024,)
    assert sorted(read.variables) == ["bias", "kernel"]


def test_16_bit_variables_are_read(source_of):
    theirs = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, dtype="bfloat16")])
    expected = theirs.layers[0].kernel.value.detach().float().numpy()
    assert numpy.array_equal(narrowcast.keras.weights_of(source_of(theirs))["0"]["kernel"], expected)


def test_a_map_of_keras_gives_each_layer_its_policy():
    given = keras.dtype_policies.DTypePolicyMap(keras.DTypePolicy("float32"))
    given["att/query"] = keras.DTypePolicy("bfloat16")
    layer = keras.layers.MultiHeadAttention(2, 4, name="att", dtype=given)
    layer.build((None, 3, 8), (None, 3, 8))
    assert narrowcast.keras.policies_of(layer).get("query").name == "bfloat16"
    assert narrowcast.keras.policies_of(layer).get("key") is None


def test_differences_are_told_all_at_once_and_nothing_is_set():
    ours = encoder_of_ours()
    before = ours[3].kernel.clone()
    with pytest.raises(TreeMismatchError) as caught:
        saving.load_keras_weights(ours, mixed_of_keras())
    assert "layer '3' is in the model and not among the weights" in str(caught.value)
    assert "layer '7' is among the weights and not in the model" in str(caught.value)
    assert torch.equal(ours[3].kernel, before)


def test_another_shape_is_told():
    ours = narrowcast.layers.Sequential([narrowcast.layers.Dense(3)])
    ours.build((None, 5))
    theirs = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    with pytest.raises(TreeMismatchError, match=r"variable 'kernel' of '0' is \(5, 3\) here, \(4, 3\) there"):
        saving.load_keras_weights(ours, theirs)


def test_a_model_that_is_not_built_is_told():
    theirs = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    with pytest.raises(TreeMismatchError, match="Build the model first"):
        saving.load_keras_weights(narrowcast.layers.Sequential([narrowcast.layers.Dense(3)]), theirs)


def test_a_path_that_is_not_there_suggests_one():
    with pytest.raises(PathError, match="did you mean 'head'"):
        narrowcast.keras.read(encoder_of_keras())["heads"]


def test_a_model_shows_its_variables_as_a_table():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, dtype="mixed_bfloat16")])
    lines = str(narrowcast.keras.read(model)).splitlines()
    assert [line.split() for line in (lines[0], lines[2])] == [
        ["path", "class", "policy", "variables"],
        ["0", "Dense", "mixed_bfloat16", "kernel", "4×3,", "bias", "3"],
    ]


def test_a_model_is_a_sequence_of_its_layers():
    model = narrowcast.keras.read(keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)]))
    assert [layer.path for layer in model] == ["", "0"]
    assert len(model) == 2


def test_a_sequential_made_by_a_layer_is_numbered_in_a_file_too(source_of):
    class Outer(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.ffn = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(2)])

        def call(self, inputs):
            return self.ffn(inputs)

    read = narrowcast.keras.read(source_of(keras.Sequential([keras.Input((4,)), Outer()])))
    assert [layer.path for layer in read if layer.variables] == ["0/ffn/0", "0/ffn/1"]


def test_what_is_no_keras_model_is_refused():
    with pytest.raises(ModelError, match="Model is not one of Keras"):
        narrowcast.keras.read(torch.nn.Linear(2, 2))


def test_a_config_of_keras_makes_the_model_here():
    theirs = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="relu", dtype="mixed_bfloat16")])
    config = keras.saving.serialize_keras_object(theirs)
    ours = saving.deserialize(config)
    saving.load_keras_weights(ours, theirs)
    x = random_floats(2, 4)
    # A product and a bias, which Keras rounds to bfloat16 one after the other.
    assert_same(ours(x), theirs(x), UNIT["mixed_bfloat16"], 4)


# Files that are not what they should be


def test_a_file_that_is_no_zip_is_refused(tmp_path):
    (tmp_path / "x.keras").write_bytes(b"no")
    with pytest.raises(CheckpointError, match=r"is no \.keras file"):
        narrowcast.keras.read(tmp_path / "x.keras")


def test_a_file_without_variables_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.keras", "w") as archive:
        archive.writestr("config.json", "{}")
    with pytest.raises(CheckpointError, match=r"is no \.keras file"):
        narrowcast.keras.read(tmp_path / "x.keras")


def rewritten(tmp_path, change):
    """A file of a model whose variables were changed by hand."""
    h5py = pytest.importorskip("h5py")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.save(tmp_path / "model.keras")
    with zipfile.ZipFile(tmp_path / "model.keras") as archive:
        config = archive.read("config.json")
        (tmp_path / "w.h5").write_bytes(archive.read("model.weights.h5"))
    with h5py.File(tmp_path / "w.h5", "a") as file:
        change(h5py, file)
    with zipfile.ZipFile(tmp_path / "bad.keras", "w") as archive:
        archive.writestr("config.json", config)
        archive.write(tmp_path / "w.h5", "model.weights.h5")
    return tmp_path / "bad.keras"


def test_a_link_to_another_file_is_refused(tmp_path):
    def change(h5py, file):
        del file["layers/dense"]
        file["layers/dense"] = h5py.ExternalLink("other.h5", "/")

    with pytest.raises(CheckpointError, match="has a link at 'dense'"):
        narrowcast.keras.read(rewritten(tmp_path, change))


def test_variables_in_another_file_are_refused(tmp_path):
    def change(h5py, file):
        group = file["layers/dense/vars"]
        del group["1"]
        group.create_dataset("1", (3,), "float32", external=[("other.bin", 0, 12)])

    with pytest.raises(CheckpointError, match="not numbered arrays"):
        narrowcast.keras.read(rewritten(tmp_path, change))


def test_arrays_far_larger_than_the_file_are_refused(tmp_path):
    def change(h5py, file):
        group = file["layers/dense/vars"]
        del group["0"]
        group.create_dataset("0", (2**20, 2**15), "float32", chunks=True, compression="gzip")

    with pytest.raises(CheckpointError, match="declares far more values than it can hold"):
        narrowcast.keras.read(rewritten(tmp_path, change))


def test_more_variables_than_a_layer_has_are_refused(tmp_path):
    def change(h5py, file):
        file["layers/dense/vars"].create_dataset("2", data=numpy.zeros(3, "float32"))

    with pytest.raises(CheckpointError, match="Layer of class Dense cannot have these variables"):
        narrowcast.keras.read(rewritten(tmp_path, change))


def test_the_vocabulary_is_large_enough_for_the_ids():
    assert int(token_ids().max()) < VOCABULARY
