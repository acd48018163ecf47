"""Whole models in a folder: architecture and weights, in this process and in another, and folders that are wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import narrowcast
from narrowcast import config as global_config
from narrowcast import layers, saving
from narrowcast.dtype_policies import DTypePolicyMap, QuantizedFloat8DTypePolicy
from narrowcast.errors import CheckpointError, ConfigError, TreeMismatchError
from tests.torch.layers.models import Block, block, floats, ids, policies, transformer


def reloaded(model, folder, **kwargs):
    narrowcast.save(model, folder)
    return narrowcast.load(folder, **kwargs)


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16", "bfloat16", "float16", "int8_from_mixed_bfloat16"])
def test_a_model_comes_back_from_its_folder_alone(tmp_path, dtype):
    model = transformer(2, 32, dtype=dtype)
    again = reloaded(model, tmp_path)
    assert policies(again) == policies(model)
    assert torch.equal(again(ids()), model(ids()))


@pytest.mark.parametrize("mode", ["int8", "int8/weight", "float8"])
def test_a_model_that_was_quantized_comes_back(tmp_path, mode):
    model = transformer(2, 32)
    model.quantize(mode)
    again = reloaded(model, tmp_path)
    assert policies(again) == policies(model)
    assert torch.equal(again(ids()), model(ids()))


def test_the_state_of_float8_comes_back(tmp_path):
    policy = QuantizedFloat8DTypePolicy("float8_from_float32", 8)
    model = layers.Sequential([layers.Dense(16, dtype=policy), layers.Dense(4)])
    model.build((None, 16))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for seed in range(3):
        optimizer.zero_grad()
        model(floats(32, 16, seed=seed)).square().sum().backward()
        optimizer.step()
    again = reloaded(model, tmp_path)
    assert again[0].dtype_policy == policy
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_a_map_of_every_mode_comes_back(tmp_path):
    given = DTypePolicyMap(
        "mixed_bfloat16",
        {"up": "int8", "native/1": "float8_from_mixed_bfloat16", "scale": "float64", "norm": "float32"},
    )
    model = block(16, inputs=16, dtype=given).eval()
    again = reloaded(model, tmp_path)
    assert policies(again) == policies(model)
    assert torch.equal(again(floats(2, 16)), model(floats(2, 16)))


def test_a_shared_layer_comes_back_shared(tmp_path):
    shared = layers.Dense(4)
    model = layers.Sequential([shared, layers.Activation("relu"), shared])
    model.build((None, 4))
    again = reloaded(model.eval(), tmp_path)
    assert again[0] is again[2]
    assert torch.equal(again(floats(2, 4)), model(floats(2, 4)))


def test_a_tied_head_comes_back_tied(tmp_path):
    @saving.register_serializable("tests")
    class Tied(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.embedding = layers.ReversibleEmbedding(20, 16)
            self.body = layers.Dense(16)

        def call(self, x):
            return self.embedding(self.body(self.embedding(x)), reverse=True)

    model = Tied().eval()
    model(ids())
    model.quantize("int8")
    again = reloaded(model, tmp_path)
    assert again.embedding.head.weight_codes.data_ptr() == again.embedding.core.weight_codes.data_ptr()
    assert torch.equal(again(ids()), model(ids()))


def test_batch_statistics_come_back(tmp_path):
    model = layers.Sequential([layers.BatchNormalization()])
    model(floats(16, 4) + 2)
    again = reloaded(model.eval(), tmp_path)
    assert torch.equal(again(floats(2, 4)), model(floats(2, 4)))


def test_a_layer_alone_comes_back(tmp_path):
    model = layers.Dense(3).eval()
    model(floats(2, 4))
    assert torch.equal(reloaded(model, tmp_path)(floats(2, 4)), model(floats(2, 4)))


def test_a_model_comes_back_in_eval_mode(tmp_path):
    model = layers.Sequential([layers.Dense(4), layers.Dropout(0.5)])
    model.build((None, 4))
    assert not reloaded(model, tmp_path).training


def test_the_global_policy_where_it_is_loaded_does_not_matter(tmp_path):
    model = block(dtype="mixed_bfloat16").eval()
    narrowcast.save(model, tmp_path)
    with global_config.policy_scope("float64"):
        assert policies(narrowcast.load(tmp_path)) == policies(model)


def test_saving_changes_nothing(tmp_path):
    given = DTypePolicyMap("float32", {"up": "bfloat16"})
    model = block(dtype=given)
    before = given.get_config(), policies(model), json.dumps(model.get_config())
    narrowcast.save(model, tmp_path)
    assert (given.get_config(), policies(model), json.dumps(model.get_config())) == before


def test_layers_of_a_model_of_pytorch_are_built_by_loading(tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = layers.Sequential([layers.Dense(16, "relu"), layers.Dense(16)])
            self.head = nn.Linear(16, 2)

        def forward(self, x):
            return self.head(self.body(x))

    model = Net().eval()
    model(floats(2, 4))
    model.body.quantize("int8")
    narrowcast.save(model, tmp_path)
    again = narrowcast.load(Net(), tmp_path).eval()
    assert torch.equal(again(floats(2, 4)), model(floats(2, 4)))


def test_a_model_that_carries_its_own_policies_gets_those_of_the_file(tmp_path):
    model = block(16, inputs=16).eval()
    model.quantize("int8")
    narrowcast.save(model, tmp_path)
    again = block(16, inputs=16, dtype="mixed_bfloat16", seed=1).eval()
    narrowcast.load(again, tmp_path)
    assert policies(again) == policies(model)
    assert torch.equal(again(floats(2, 16)), model(floats(2, 16)))


SCRIPT = """
    import sys, torch, narrowcast
    {registers}
    folder = sys.argv[1]
    model = narrowcast.load(folder + "/model")
    torch.save(model(torch.load(folder + "/x.pt")), folder + "/y.pt")
"""


def in_another_process(folder, registers):
    script = textwrap.dedent(SCRIPT).format(registers=registers)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", script, str(folder)], capture_output=True, text=True, env=environment, check=False
    )


def test_a_model_of_narrowcast_s_layers_needs_no_code_in_another_process(tmp_path):
    model = transformer(1, 32)
    model.quantize("int8")
    narrowcast.save(model, tmp_path / "model")
    torch.save(ids(), tmp_path / "x.pt")
    done = in_another_process(tmp_path, "")
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(tmp_path / "y.pt"), model(ids()))


def test_a_custom_block_in_int8_predicts_the_same_bits_in_another_process(tmp_path):
    model = layers.Sequential([block(16, inputs=16, dtype="mixed_bfloat16"), layers.Dense(3)])
    model.build((None, 16))
    model.eval().quantize("int8")
    narrowcast.save(model, tmp_path / "model")
    torch.save(floats(2, 16), tmp_path / "x.pt")
    done = in_another_process(tmp_path, "import tests.torch.layers.models")
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(tmp_path / "y.pt"), model(floats(2, 16)))


def test_a_class_that_is_not_registered_there_is_told(tmp_path):
    narrowcast.save(block(), tmp_path / "model")
    torch.save(floats(2, 4), tmp_path / "x.pt")
    done = in_another_process(tmp_path, "")
    assert "Class 'tests>Block' of a config is unknown" in done.stderr


def test_a_module_of_pytorch_in_a_model_of_layers_needs_its_code(tmp_path):
    model = layers.Sequential([layers.Dense(2), nn.Linear(2, 2)])
    model.build((None, 2))
    narrowcast.save(model, tmp_path)
    with pytest.raises(CheckpointError, match=r"type='torch\.nn\.modules\.linear\.Linear'"):
        narrowcast.load(tmp_path)


def test_classes_can_be_given(tmp_path):
    class Own(Block):
        pass

    model = Own(4)
    model.build((None, 4))
    again = reloaded(model.eval(), tmp_path, custom_objects={"Own": Own})
    assert torch.equal(again(floats(2, 4)), model(floats(2, 4)))


def test_a_model_of_pytorch_says_that_it_needs_its_code(tmp_path):
    narrowcast.save(nn.Sequential(nn.Linear(2, 2)), tmp_path)
    with pytest.raises(
        CheckpointError, match="Saved model says not how it is made: it holds no layers of narrowcast.layers"
    ):
        narrowcast.load(tmp_path)


def test_a_model_whose_config_cannot_be_written_says_why_when_it_is_loaded(tmp_path):
    model = layers.Sequential([layers.Dense(2, activation=lambda x: x)])
    model.build((None, 2))
    narrowcast.save(model, tmp_path)
    with pytest.raises(CheckpointError, match="Function is not registered"):
        narrowcast.load(tmp_path)
    assert torch.equal(
        narrowcast.load(layers.Sequential([layers.Dense(2)]), tmp_path)(floats(1, 2)), model(floats(1, 2))
    )


def changed(folder, change):
    path = folder / "narrowcast.json"
    content = json.loads(path.read_text())
    change(content["architecture"])
    path.write_text(json.dumps(content))


def test_a_config_with_an_unknown_class_is_an_error(tmp_path):
    narrowcast.save(transformer(1), tmp_path)
    changed(tmp_path, lambda a: a["config"]["config"]["layers"][3].update(class_name="Popen", module="subprocess"))
    with pytest.raises(ConfigError, match="Class 'Popen' of a config is unknown"):
        narrowcast.load(tmp_path)


def test_a_config_of_another_shape_is_told_by_layer(tmp_path):
    narrowcast.save(transformer(1), tmp_path)
    changed(tmp_path, lambda a: a["config"]["config"]["layers"][3]["config"].update(units=21))
    with pytest.raises(TreeMismatchError, match=r"parameter 'weight' of '3' is \(20, 16\) as saved, \(21, 16\)"):
        narrowcast.load(tmp_path)


def test_a_config_with_a_layer_too_many_is_told(tmp_path):
    narrowcast.save(transformer(1), tmp_path)
    changed(tmp_path, lambda a: a["config"]["config"]["layers"].append({"class_name": "Softmax", "config": {}}))
    with pytest.raises(TreeMismatchError, match="layer '4' is in the model and not saved"):
        narrowcast.load(tmp_path)


def test_a_config_that_is_no_layer_s_is_an_error(tmp_path):
    narrowcast.save(transformer(1), tmp_path)
    changed(tmp_path, lambda a: a.update(config={"class_name": "Zeros", "config": {}}))
    with pytest.raises(CheckpointError, match="config is not that of a layer"):
        narrowcast.load(tmp_path)


def test_an_argument_that_does_not_fit_is_an_error(tmp_path):
    narrowcast.save(transformer(1), tmp_path)
    changed(tmp_path, lambda a: a["config"]["config"]["layers"][3]["config"].update(surprise=1))
    with pytest.raises(ConfigError, match="surprise"):
        narrowcast.load(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"units": 10**14},  # more than there is memory for
        {"kernel_initializer": {"class_name": "Broken", "config": {}}},
    ],
)
def test_a_config_that_fails_in_the_making_is_an_error(tmp_path, change):
    class Broken:
        @classmethod
        def from_config(cls, config):
            raise KeyError("gone")

    narrowcast.save(transformer(1), tmp_path)
    changed(tmp_path, lambda a: a["config"]["config"]["layers"][3]["config"].update(change))
    with pytest.raises(CheckpointError, match="Saved model cannot be made from its config"):
        narrowcast.load(tmp_path, custom_objects={"Broken": Broken})


def test_a_load_that_fails_leaves_a_given_model_as_it_was(tmp_path):
    narrowcast.save(transformer(1), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no")
    model = transformer(1, dtype="mixed_bfloat16", seed=3)
    before = policies(model), model(ids())
    with pytest.raises(CheckpointError):
        narrowcast.load(model, tmp_path)
    assert policies(model) == before[0]
    assert torch.equal(model(ids()), before[1])


def test_loading_without_a_folder_says_what_it_takes():
    with pytest.raises(narrowcast.errors.ModelError, match=r"`load\(model, folder\)` or `load\(folder\)`"):
        narrowcast.load(nn.Linear(2, 2))


def test_many_layers_take_time_in_proportion_to_their_number(tmp_path):
    # Not a measurement: twice as many layers call the functions that cost most about twice as often.
    import cProfile
    import pstats

    def calls(num_layers):
        model = layers.Sequential([layers.Dense(2) for _ in range(num_layers)])
        profile = cProfile.Profile()
        profile.enable()
        model.build((None, 2))
        reloaded(model, tmp_path)
        profile.disable()
        return pstats.Stats(profile).total_calls

    assert calls(100) < 2.6 * calls(50)
