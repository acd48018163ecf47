"""One array in NumPy, PyTorch and JAX, and its bits back in NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch


def to_numpy(x):
    return x


def to_torch(x):
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())


def to_jax(x):
    import jax.numpy as jnp

    return jnp.asarray(x)


FRAMEWORKS = {"numpy": to_numpy, "torch": to_torch, "jax": to_jax}


def back(x):
    return x.numpy() if isinstance(x, torch.Tensor) else np.asarray(x)


def assert_same_bits(actual, expected):
    """Equal bit for bit; any NaN equals any other."""
    actual, expected = back(actual), back(expected)
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if actual.dtype.kind == "f":
        nan = np.isnan(expected)
        np.testing.assert_array_equal(np.isnan(actual), nan)
        actual, expected = np.where(nan, 0, actual), np.where(nan, 0, expected)
        actual, expected = actual.view(np.uint32), expected.view(np.uint32)
    np.testing.assert_array_equal(actual, expected)
