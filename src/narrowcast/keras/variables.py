"""The variables of Keras' layers: in which order a mode stores them, and the floats that they stand for.

A layer's variables stand in a `.keras` file under their number in these lists; those that a layer does not have are
left out and the others move up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from narrowcast.errors import CheckpointError, UnsupportedError

__all__ = ["floats_of", "mode_of_arrays", "named", "spelled"]

Names = tuple[str, ...]

_STATES = tuple(f"{role}_{part}" for role in ("inputs", "kernel", "outputs_grad") for part in ("scale", "amax_history"))
_KERNEL: dict[str, tuple[Names, ...]] = {
    "": (("kernel", "bias"), ("kernel",)),
    "int8": (("kernel", "bias", "kernel_scale"), ("kernel", "kernel_scale")),
    "int4": (
        ("kernel", "bias", "kernel_scale", "kernel_zero", "g_idx"),
        ("kernel", "kernel_scale", "kernel_zero", "g_idx"),
        ("kernel", "bias", "kernel_scale"),
        ("kernel", "kernel_scale"),
    ),
    "float8": (("kernel", "bias", *_STATES), ("kernel", *_STATES)),
}
_TABLE: dict[str, tuple[Names, ...]] = {
    "": (("embeddings",), ("embeddings", "reverse_embeddings")),
    "int8": (
        ("embeddings", "embeddings_scale"),
        ("embeddings", "embeddings_scale", "reverse_embeddings", "reverse_embeddings_scale"),
    ),
    "int4": (
        ("embeddings", "embeddings_scale", "embeddings_zero", "g_idx"),
        ("embeddings", "embeddings_scale"),
        ("embeddings", "embeddings_scale", "reverse_embeddings", "reverse_embeddings_scale"),
        (
            *("embeddings", "embeddings_scale", "embeddings_zero", "g_idx"),
            *("reverse_embeddings", "reverse_embeddings_scale", "reverse_embeddings_zero"),
        ),
    ),
}
_MOVING = ("moving_mean", "moving_variance")

ORDERS: Mapping[str, Mapping[str, tuple[Names, ...]]] = {
    "Dense": _KERNEL,
    "EinsumDense": _KERNEL,
    "Conv1D": {"": _KERNEL[""]},
    "Conv2D": {"": _KERNEL[""]},
    "Embedding": _TABLE,
    "ReversibleEmbedding": _TABLE,
    "LayerNormalization": {"": (("gamma", "beta"), ("gamma",), ("beta",))},
    "RMSNormalization": {"": (("scale",),)},
    "BatchNormalization": {
        "": (("gamma", "beta", *_MOVING), ("gamma", *_MOVING), ("beta", *_MOVING), _MOVING),
    },
}
"""By class and mode (`''` for floats), the variables in the order in which they are stored, in every form they have."""


def mode_of_arrays(class_name: str, arrays: Sequence[Any]) -> str:
    """Returns the mode in which a layer's variables are stored, where no config says it: `''` for floats.

    Example:
        >>> mode_of_arrays("Dense", [np.zeros((4, 3), np.int8), np.zeros(3), np.zeros(3)])
        'int8'
    """
    if not arrays or class_name not in ORDERS:
        return ""
    if arrays[0].dtype == np.int8:
        is_table = "embeddings" in ORDERS[class_name][""][0]
        is_packed = _is_packed_table(arrays) if is_table else _is_packed_kernel(arrays)
        return "int4" if is_packed else "int8"
    return "float8" if len(arrays) > len(ORDERS[class_name][""][0]) and "float8" in ORDERS[class_name] else ""


def _is_packed_kernel(arrays: Sequence[Any]) -> bool:
    """Whether two codes share a byte: then a kernel has two axes, and twice as many scales as bytes in a row."""
    codes, scale = arrays[0], arrays[-1]
    has_groups = len(arrays) > max(map(len, _KERNEL["int8"]))
    width = codes.shape[-1]
    return has_groups or (codes.ndim == 2 and scale.ndim == 1 and len(scale) != width and -(-len(scale) // 2) == width)


def _is_packed_table(arrays: Sequence[Any]) -> bool:
    """Whether a table has groups, which int8 has not. Without them its arrays look alike, and are taken for int8."""
    return len(arrays) > 1 and arrays[1].ndim > 1


def named(class_name: str, arrays: Sequence[Any], mode: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a layer's stored variables by name; by number where the class is not known.

    Args:
        class_name: the layer's class.
        arrays: in the order of the file.
        mode: the mode they are stored in.
        config: of the layer, which says whether a norm has a `gamma` or a `beta`; may be empty.

    Raises:
        CheckpointError: the layer has no form with so many variables in this mode.
    """
    if not arrays:  # not built, or without variables
        return {}
    if class_name not in ORDERS:
        return {str(number): array for number, array in enumerate(arrays)}
    absent = {name for name, flag in (("gamma", "scale"), ("beta", "center")) if config.get(flag) is False}
    for names in ORDERS[class_name].get(mode, ()):
        if "embeddings_zero" in names and not _is_packed_table(arrays):
            continue
        if len(names) == len(arrays) and not absent & set(names):
            return dict(zip(names, arrays, strict=True))
    raise CheckpointError(
        f"Layer of class {class_name} cannot have these variables",
        got={"shapes": [tuple(array.shape) for array in arrays], "mode": mode or "none"},
        expected=" or ".join(", ".join(names) for names in ORDERS[class_name].get(mode, ())),
    )


def spelled(mode: str, stored: Mapping[str, Any]) -> str:
    """Returns a mode as policies spell it; of int4 with one group, the length of that: what was asked may be more.

    Example:
        >>> spelled("int4", {"g_idx": np.array([0, 0, 1])}), spelled("int4", {}), spelled("int8", {})
        ('int4/2', 'int4/-1', 'int8')
    """
    find = _SETTINGS.get(mode)
    return mode if find is None else f"{mode}/{find(stored)}"


def _group_size(stored: Mapping[str, Any]) -> int:
    groups = stored.get("g_idx")
    return -1 if groups is None else int((groups == groups[0]).sum())


_SETTINGS = {"int4": _group_size}
"""What a mode's name says beside the mode, read off the variables."""


def floats_of(class_name: str, mode: str, stored: Mapping[str, Any], equation: str | None = None) -> dict[str, Any]:
    """Returns the variables that stored ones stand for, as floats, without scales and states.

    A kernel of int4 of an `EinsumDense` comes with two axes, all that is summed over and all others.

    Args:
        class_name: the layer's class.
        mode: the mode of `stored`.
        stored: by name.
        equation: of an `EinsumDense`, where it is known.

    Raises:
        UnsupportedError: the mode is not read.
    """
    if mode not in _DECODERS:
        raise UnsupportedError(
            f"Variables of mode {mode!r} are not read", expected=f"one of {', '.join(filter(None, _DECODERS))}"
        )
    decode = _DECODERS[mode]
    found = {}
    for name, value in stored.items():
        if name in ("kernel", "embeddings", "reverse_embeddings"):
            value = decode(name, stored, class_name, equation)
        elif name.endswith(("_scale", "_zero", "_amax_history")) or name == "g_idx":
            continue
        found[name] = value
    return found


def _as_stored(name: str, stored: Mapping[str, Any], class_name: str, equation: str | None) -> Any:
    return stored[name]


def _from_int8(name: str, stored: Mapping[str, Any], class_name: str, equation: str | None) -> Any:
    codes, scale = stored[name], np.asarray(stored[f"{name}_scale"], np.float32)
    if name == "embeddings":
        scale = scale[:, None]
    elif equation is not None:
        scale = _aligned(scale, codes.shape, equation)
    elif scale.ndim > codes.ndim:
        scale = scale.reshape(scale.shape[scale.ndim - codes.ndim :])
    return codes.astype(np.float32) / scale


def _aligned(scale: Any, shape: tuple[int, ...], equation: str) -> Any:
    """The scale of an equation's kernel, which has the axes of the output, with the axes of the kernel."""
    _, kernel, output = re.split(",|->", equation.replace("...", ""))
    sizes = dict(zip(output, scale.shape[scale.ndim - len(output) :], strict=True))
    flat = scale.reshape([sizes[label] for label in output])
    flat = flat.reshape([n for label, n in zip(output, flat.shape, strict=True) if label in kernel])
    there = [label for label in output if label in kernel]
    moved = flat.transpose([there.index(label) for label in kernel if label in there])
    return moved.reshape([n if label in there else 1 for label, n in zip(kernel, shape, strict=True)])


def _from_int4(name: str, stored: Mapping[str, Any], class_name: str, equation: str | None) -> Any:
    packed, scale = stored[name].astype(np.uint8), np.asarray(stored[f"{name}_scale"], np.float32)
    is_table, is_reverse = name == "embeddings", name == "reverse_embeddings"
    groups = stored.get("g_idx")
    if is_reverse:  # its bytes hold two codes of a column
        packed = packed.T
    width = packed.shape[-1] * 2
    if not is_table and not is_reverse:
        width = scale.shape[-1]
    elif groups is not None:
        width = len(groups)
    nibbles = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)[..., :width]
    codes = np.where(nibbles > 7, nibbles.astype(np.float32) - 16, nibbles.astype(np.float32))
    if is_reverse:
        codes = codes.T
    if groups is None:
        return codes / (scale[:, None] if is_table else scale)
    index = np.asarray(groups).astype(np.int64)
    axis = -1 if is_table else 0
    zero = np.asarray(stored[f"{name}_zero"], np.float32)
    return (codes - np.take(zero, index, axis)) * np.take(scale, index, axis)


_DECODERS = {"": _as_stored, "float8": _as_stored, "int8": _from_int8, "int4": _from_int4}
