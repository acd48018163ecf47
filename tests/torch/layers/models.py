"""Models made of layers, registered so that they can be saved."""

from __future__ import annotations

import torch
from torch import nn

from narrowcast import layers, saving


@saving.register_serializable("tests")
class Scale(layers.Layer):
    """A layer with variables made in `__init__` and in `build`."""

    def __init__(self, offset=0.0, **kwargs):
        super().__init__(**kwargs)
        self.offset = offset
        self.early = self.add_weight(shape=(), initializer="ones", name="early")

    def build(self, input_shape):
        self.late = self.add_weight(shape=(input_shape[-1],), initializer="ones", name="late")

    def call(self, inputs):
        return inputs * self.late * self.early + self.offset


@saving.register_serializable("tests")
class Block(layers.Layer):
    """A layer of layers, of which one is no Keras-style layer."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.up = layers.Dense(units, "relu")
        self.scale = Scale()
        self.native = nn.Sequential(nn.Identity(), layers.Dense(units))
        self.norm = layers.LayerNormalization()

    def call(self, x):
        return self.norm(self.native(self.scale(self.up(x))))


def block(units=8, dtype=None, inputs=4, seed=0):
    torch.manual_seed(seed)
    made = Block(units, dtype=dtype)
    made.build((None, inputs))
    return made


def transformer(num_blocks=2, width=16, dtype=None, seed=0, vocabulary=20):
    torch.manual_seed(seed)
    model = layers.Sequential(
        [
            layers.Embedding(vocabulary, width),
            *(layers.TransformerBlock(2 * width, 4) for _ in range(num_blocks)),
            layers.LayerNormalization(),
            layers.Dense(vocabulary),
        ],
        dtype=dtype,
    )
    model.build((None, 6))
    return model.eval()


def ids(batch=2, length=6, vocabulary=20, seed=1):
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


def floats(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def policies(layer):
    return {inner.path: inner.dtype_policy.name for inner in layer._flatten_layers()}
