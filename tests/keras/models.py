"""Real Keras models, and their counterparts in narrowcast's layers."""

from __future__ import annotations

import torch

import narrowcast.layers as ours
from tests.torch.layers.peer import keras

__all__ = ["encoder_of_keras", "encoder_of_ours", "keras", "mixed_of_keras", "mixed_of_ours"]

WIDTH, LENGTH, VOCABULARY = 16, 5, 20
RENAME = {
    "token": "0",
    "block": "1",
    "norm": "2",
    "head": "3",
}


def mixed_of_keras():
    """A Sequential with a layer of every class that has weights."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 6)),
            layers.Conv1D(8, 3, padding="same", activation="relu"),
            layers.LayerNormalization(),
            layers.EinsumDense("abc,cd->abd", (None, 12), bias_axes="d", dtype="mixed_bfloat16"),
            layers.Dropout(0.1),
            layers.RMSNormalization(),
            layers.BatchNormalization(),
            layers.Dense(5, activation="gelu", dtype="float64"),
            layers.Dense(3, use_bias=False),
            layers.Softmax(),
        ]
    )


def mixed_of_ours():
    model = ours.Sequential(
        [
            ours.Conv1D(8, 3, padding="same", activation="relu"),
            ours.LayerNormalization(),
            ours.EinsumDense("abc,cd->abd", (None, 12), bias_axes="d", dtype="mixed_bfloat16"),
            ours.Dropout(0.1),
            ours.RMSNormalization(),
            ours.BatchNormalization(),
            ours.Dense(5, activation="gelu", dtype="float64"),
            ours.Dense(3, use_bias=False),
            ours.Softmax(),
        ]
    )
    model.build((None, 8, 6))
    return model.eval()


class KerasBlock(keras.layers.Layer):
    """A block as one writes it in Keras."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = keras.layers.MultiHeadAttention(4, WIDTH // 4)
        self.attention_norm = keras.layers.LayerNormalization(epsilon=1e-5)
        self.feedforward_norm = keras.layers.LayerNormalization(epsilon=1e-5)
        self.up = keras.layers.Dense(2 * WIDTH, activation="relu")
        self.down = keras.layers.Dense(WIDTH)

    def build(self, shape):
        self.attention.build(shape, shape)
        for layer in (self.attention_norm, self.feedforward_norm, self.up):
            layer.build(shape)
        self.down.build((*shape[:-1], 2 * WIDTH))

    def call(self, x):
        y = self.attention_norm(x)
        x = x + self.attention(y, y)
        return x + self.down(self.up(self.feedforward_norm(x)))


def encoder_of_keras(seed=0):
    keras.utils.set_random_seed(seed)
    ids = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, WIDTH, name="token")(ids)
    x = KerasBlock(name="block")(x)
    x = keras.layers.LayerNormalization(name="norm")(x)
    return keras.Model(ids, keras.layers.Dense(VOCABULARY, name="head")(x))


def encoder_of_ours(**kwargs):
    model = ours.Sequential(
        [
            ours.Embedding(VOCABULARY, WIDTH),
            ours.TransformerBlock(2 * WIDTH, 4),
            ours.LayerNormalization(),
            ours.Dense(VOCABULARY),
        ],
        **kwargs,
    )
    model.build((None, LENGTH))
    return model.eval()


def token_ids(batch=3):
    return torch.randint(VOCABULARY, (batch, LENGTH), generator=torch.Generator().manual_seed(0))
