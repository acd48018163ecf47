"""Keras itself, on PyTorch, as the measure: the same layer there and here, with the same weights."""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "torch")  # read by keras when it is imported, so tests import it from here

import keras
import numpy
import torch

__all__ = ["UNIT", "assert_same", "assert_same_training", "keras", "random_floats", "twins", "weights_of"]

UNIT = {"float32": 2.0**-24, "mixed_bfloat16": 2.0**-8, "mixed_float16": 2.0**-11}
"""Half a unit in the last place of 1, by policy: what one rounding to the compute dtype may change."""


def random_floats(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights_of(layer):
    """Returns the weights of a layer of Keras; its own `get_weights` warns with NumPy 2."""
    values = [variable.value.detach() for variable in layer.weights]
    return [(value.float() if value.dtype is torch.bfloat16 else value).numpy() for value in values]


def twins(make, *inputs, policy="float32", **kwargs):
    """Returns the layer that `make(namespace, dtype)` makes, here and in Keras, built and with the same weights."""
    import narrowcast.layers as ours

    keras.utils.set_random_seed(1)
    theirs = make(keras.layers, policy)
    mine = make(ours, policy)
    with torch.no_grad():
        theirs(*inputs, **kwargs)
        mine(*inputs, **kwargs)
    numbers = numpy.random.default_rng(1)
    # Values that initializers leave at 0 and 1 would hide mistakes.
    weights = [w + numbers.normal(0, 0.1, w.shape).astype(w.dtype) ** 2 for w in weights_of(theirs)]
    theirs.set_weights(weights)
    mine.set_weights(weights)
    return mine, theirs


def assert_same(actual, expected, unit, num_roundings):
    """Asserts that no element differs by more than so many roundings of the largest magnitude."""
    actual, expected = (torch.as_tensor(x).detach().double() for x in (actual, expected))
    assert actual.shape == expected.shape
    scale = expected.abs().max().clamp(min=1e-30)
    error = float(((actual - expected).abs().max() / scale) / unit)
    assert error <= num_roundings, f"{error:.1f} roundings, at most {num_roundings} expected"


def assert_same_training(mine, theirs, *inputs, unit, num_roundings, **kwargs):
    """Asserts equal outputs, equal gradients of floating inputs and equal variables after one step of SGD."""
    results = []
    for layer, parameters in ((mine, mine.parameters()), (theirs, [v.value for v in theirs.trainable_weights])):
        given = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
        optimizer = torch.optim.SGD([p for p in parameters if p.requires_grad] or [torch.zeros(1)], lr=0.1)
        outputs = layer(*given, **kwargs)
        weighting = torch.linspace(-1, 1, outputs.numel()).reshape(outputs.shape)
        (outputs.float() * weighting).sum().backward()
        optimizer.step()
        gradients = [x.grad for x in given if x.requires_grad]
        results.append((outputs, gradients, layer.get_weights() if layer is mine else weights_of(layer)))
    (outputs, gradients, weights), (other_outputs, other_gradients, other_weights) = results
    assert outputs.dtype == other_outputs.dtype
    assert_same(outputs, other_outputs, unit, num_roundings)
    for gradient, other in zip(gradients, other_gradients, strict=True):
        assert_same(gradient, other, unit, num_roundings)
    assert [w.shape for w in weights] == [w.shape for w in other_weights]
    for weight, other in zip(weights, other_weights, strict=True):
        assert_same(weight, other, unit, num_roundings)
