"""State of Keras and of Transformer Engine, continued here as if this library had seen it."""

from __future__ import annotations

import json
import math
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import narrowcast
from narrowcast.errors import CheckpointError
from narrowcast.numerics.delayed_scaling import in_order
from narrowcast.torch.float8_import import read_keras, read_transformer_engine
from narrowcast.torch.float8_rounding import FORWARD

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "float8_vectors.json").read_text("utf-8"))["delayed_scaling"]


@pytest.fixture
def keras():
    """Keras on PyTorch, which it takes by a variable that it reads when it is imported."""
    os.environ.setdefault("KERAS_BACKEND", "torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import keras

        yield keras


def case(algorithm, length=4):
    return next(c for c in VECTORS if (c["algorithm"], c["sequence"], c["history_len"]) == (algorithm, "plain", length))


def layer_of(length):
    layer = narrowcast.apply(nn.Linear(4, 4), narrowcast.QuantizedFloat8DTypePolicy("float32", length))
    return layer, torch.optim.SGD(layer.parameters(), lr=0.0)


def see(layer, optimizer, amax):
    layer(torch.full((1, 4), float(amax))).sum().backward()
    optimizer.step()


def engine_state(step):
    history = np.zeros((len(step["history"]), 3), np.float32)
    history[:, 0] = step["history"]
    scale = np.ones(3, np.float32)
    scale[0] = step["scale_next"]
    return {
        "scale_fwd": scale,
        "amax_history_fwd": history,
        "scale_bwd": np.ones(2, np.float32),
        "amax_history_bwd": np.zeros((len(step["history"]), 2), np.float32),
    }


@pytest.mark.parametrize("after", range(1, 9))
def test_training_goes_on_with_the_scales_of_transformer_engine(after):
    steps = case("transformer_engine_fused")["steps"]
    layer, optimizer = layer_of(4)
    layer.load_state_dict(read_transformer_engine(engine_state(steps[after - 1])), strict=False)
    assert layer.float8_scale[0] == np.float32(steps[after - 1]["scale_next"])
    for step in steps[after:]:
        see(layer, optimizer, step["amax"])
        assert layer.float8_scale[0] == np.float32(step["scale_next"])


def keras_variables(step):
    zeros = np.zeros(len(step["history"]), np.float32)
    history = np.asarray([float(a) for a in step["history"]], np.float32)
    return {
        "inputs_amax_history": history,
        "inputs_scale": np.float32(step["scale_next"]),
        "kernel_amax_history": zeros,
        "outputs_grad_amax_history": zeros,
    }


@pytest.mark.parametrize("after", range(1, 9))
def test_a_keras_history_is_continued_as_if_it_had_been_seen_here(after):
    steps = case("keras")["steps"]
    seen, optimizer = layer_of(4)
    for step in steps[:after]:
        see(seen, optimizer, step["amax"])
    read, other = layer_of(4)
    read.load_state_dict(read_keras(keras_variables(steps[after - 1])), strict=False)
    for step in steps[after:]:
        assert read.float8_scale[0] == seen.float8_scale[0]
        see(read, other, step["amax"])
        see(seen, optimizer, step["amax"])
    assert (
        in_order(read.float8_amax_history, read.float8_history_index)[0].tolist()
        == in_order(seen.float8_amax_history, seen.float8_history_index)[0].tolist()
    )


def test_a_layer_that_keras_trained_is_read(keras):
    dense = keras.layers.Dense(4, dtype="float8_from_float32")
    model = keras.Sequential([dense])
    model.compile(optimizer="sgd", loss="mse")
    for amax in (1.0, 4.0, 2.0):
        model.train_on_batch(np.full((1, 4), amax, np.float32), np.zeros((1, 4), np.float32))
    variables = {v.name: keras.ops.convert_to_numpy(v.value) for v in dense.variables}
    state = read_keras(variables)
    assert state["float8_amax_history"][0, -3:].tolist() == [1.0, 4.0, 2.0]
    # Keras' own scale has not seen the last step, whose amax is smaller than what the history holds.
    assert state["float8_scale"][0] == FORWARD.largest / 4.0
    assert 1 / variables["inputs_scale"] == pytest.approx(FORWARD.largest / 4.0)
    layer, _ = layer_of(1024)
    assert layer.load_state_dict(state, strict=False).unexpected_keys == []


def test_pending_amaxes_and_the_second_gemm_are_read():
    state = {
        "scale_fwd": np.arange(6, dtype=np.float32),
        "amax_history_fwd": np.arange(18, dtype=np.float32).reshape(3, 6),
        "scale_bwd": torch.arange(4.0),
        "amax_history_bwd": torch.arange(12.0).reshape(3, 4),
    }
    read = read_transformer_engine(state, gemm=1)
    assert read["float8_scale"].tolist() == [3.0, 4.0, 2.0]
    assert read["float8_amax_history"].tolist() == [[0.0, 9.0, 15.0], [0.0, 10.0, 16.0], [0.0, 6.0, 10.0]]
    assert read["float8_pending_amax"].tolist() == [3.0, 4.0, 2.0]


def test_entries_that_are_not_finite_are_dropped():
    variables = keras_variables({"history": [math.nan, math.inf, 2.0, 1.0], "scale_next": 1.0})
    state = read_keras(variables)
    assert state["float8_amax_history"][0].tolist() == [0.0, 2.0, 1.0, 0.0]
    assert state["float8_scale"][0] == 224.0


def test_other_layouts_are_refused():
    good = keras_variables({"history": [1.0, 2.0], "scale_next": 1.0})
    with pytest.raises(CheckpointError, match="has no 'kernel_amax_history'"):
        read_keras({name: value for name, value in good.items() if name != "kernel_amax_history"})
    with pytest.raises(CheckpointError, match=r"another layout: inputs_amax_history. Got shape=\(2, 2\)"):
        read_keras({**good, "inputs_amax_history": np.ones((2, 2))})
    with pytest.raises(CheckpointError, match="differ in length"):
        read_keras({**good, "inputs_amax_history": np.ones(3)})
    engine = engine_state({"history": [0.0, 1.0], "scale_next": 448.0})
    with pytest.raises(CheckpointError, match=r"another layout: amax_history_fwd. Got shape=\(2, 3\), .*gemm=1"):
        read_transformer_engine(engine, gemm=1)
