"""Keras 3 models, live or in `.keras` files: their policies as a map, a map carried out on them, their weights.

Only `plan` and `apply` use Keras itself, through the model they are given; a file is read without it.

Example:
    >>> import os; os.environ["KERAS_BACKEND"] = "torch"
    >>> import keras, narrowcast.keras
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, dtype="mixed_bfloat16")])
    >>> narrowcast.keras.policies_of(model)["0"]
    <DTypePolicy "mixed_bfloat16">
    >>> sorted(narrowcast.keras.read(model)["0"].variables)
    ['bias', 'kernel']
"""

from narrowcast.keras.applying import apply, plan, tree
from narrowcast.keras.reading import policies_of, read, weights_of
from narrowcast.keras.records import KerasLayer, KerasModel

__all__ = ["KerasLayer", "KerasModel", "apply", "plan", "policies_of", "read", "tree", "weights_of"]
