"""Delayed-scaling state of other libraries, read into the form that a float8 layer here loads.

Two opposite conventions are in use. Keras (and Flax) divide values by their scale before the cast and keep the newest
amax first; Transformer Engine multiplies, as narrowcast does, and keeps the newest last, behind a pending one at 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from narrowcast.errors import CheckpointError
from narrowcast.torch.float8_rounding import Format
from narrowcast.torch.float8_scaling import current_scale
from narrowcast.torch.float8_state import HISTORY, INDEX, PENDING, ROLES, SCALE

__all__ = ["read_keras", "read_transformer_engine"]

_KERAS = {"input": "inputs", "weight": "kernel", "gradient": "outputs_grad"}
_ENGINE = {"input": ("fwd", 3, 0), "weight": ("fwd", 3, 1), "gradient": ("bwd", 2, 0)}
"""For each role: the direction, how many tensors a GEMM has in it, and which of them it is."""


def read_keras(variables: Mapping[str, Any], *, margin: int = 0) -> dict[str, Tensor]:
    """Returns the state of a float8 layer from the six float8 variables of a Keras layer.

    Args:
        variables: `inputs_amax_history`, `kernel_amax_history` and `outputs_grad_amax_history`, arrays of shape
            `(length,)` of any framework. Scales may be there and are not needed.
        margin: of the policy that goes on with it.

    Returns:
        The four tensors of `narrowcast.torch.float8_state`, to be given to `load_state_dict(..., strict=False)`.

    Raises:
        CheckpointError: a history is missing or has another shape.

    Numerics:
        Scales are those that narrowcast would have after seeing the same steps. Keras' own are one step older: it
        quantizes with the scale of the step before the last. Entries that are not finite are dropped.

    Example:
        >>> zeros = np.zeros(4, np.float32)
        >>> state = read_keras({"inputs_amax_history": [2.0, 0.0, 4.0, 1.0], "kernel_amax_history": zeros,
        ...                     "outputs_grad_amax_history": zeros})
        >>> state["float8_amax_history"][0].tolist(), state["float8_scale"].tolist()
        ([0.0, 4.0, 1.0, 2.0], [112.0, 0.0, 0.0])
    """
    histories, scales = [], []
    for role, to in ROLES:
        newest_first = _vector(variables, f"{_KERAS[role]}_amax_history")
        history = torch.cat([newest_first[1:], newest_first[:1]])
        histories.append(history)
        scales.append(_scale_of(history, to, margin))
    return _state(scales, histories, [torch.zeros((), device="cpu")] * len(ROLES))


def read_transformer_engine(state: Mapping[str, Any], *, gemm: int = 0) -> dict[str, Tensor]:
    """Returns the state of a float8 layer from the delayed-scaling state of a Transformer Engine module.

    Args:
        state: what the module's `_extra_state` holds once it is unpickled: `scale_fwd`, `scale_bwd`, shape
            `(tensors,)`, and `amax_history_fwd`, `amax_history_bwd`, shape `(length, tensors)`; arrays of any
            framework.
        gemm: which of the module's GEMMs (a `LayerNormMLP` has two).

    Returns:
        The four tensors of `narrowcast.torch.float8_state`, to be given to `load_state_dict(..., strict=False)`.

    Raises:
        CheckpointError: an entry is missing, or the module has no such GEMM.

    Numerics:
        Scales are taken as they are; training goes on with the same ones as in Transformer Engine. The oldest entry of
        the history, which it drops as soon as it has used it, is 0 here. Entries that are not finite are dropped.

    Example:
        >>> state = read_transformer_engine({
        ...     "scale_fwd": [112.0, 448.0, 1.0], "amax_history_fwd": [[0, 0, 0], [4.0, 0.5, 0], [2.0, 1.0, 0]],
        ...     "scale_bwd": [1.0, 1.0], "amax_history_bwd": [[0, 0], [0, 0], [0, 0]]})
        >>> state["float8_amax_history"][0].tolist(), state["float8_scale"].tolist()
        ([0.0, 4.0, 2.0], [112.0, 448.0, 0.0])
    """
    histories, scales, pending = [], [], []
    for role, _ in ROLES:
        direction, num_tensors, which = _ENGINE[role]
        column = gemm * num_tensors + which
        matrix = _array(state, f"amax_history_{direction}")
        scale = _array(state, f"scale_{direction}")
        if matrix.dim() != 2 or column >= matrix.shape[1] or scale.shape != matrix.shape[1:] or len(matrix) < 1:
            raise CheckpointError(
                f"History of Transformer Engine has another layout: amax_history_{direction}",
                got={"shape": tuple(matrix.shape), "scale": tuple(scale.shape), "gemm": gemm},
                expected=f"(length, at least {column + 1}), and a scale for each of its columns",
            )
        history = _finite(matrix[:, column])
        pending.append(history[0].clone())
        history[0] = 0.0
        histories.append(history)
        has_seen = bool(history.any())
        scales.append(scale[column] if has_seen else torch.zeros((), device="cpu"))
    return _state(scales, histories, pending)


def _scale_of(history: Tensor, to: Format, margin: int) -> Tensor:
    largest = history.max()
    return torch.where(largest > 0, current_scale(largest, to.largest, margin), 0.0)


def _state(scales: list[Tensor], histories: list[Tensor], pending: list[Tensor]) -> dict[str, Tensor]:
    """The four tensors; histories are given oldest first."""
    lengths = {len(history) for history in histories}
    if len(lengths) > 1:
        raise CheckpointError("Histories of one layer differ in length", got={"lengths": sorted(lengths)})
    return {
        SCALE: torch.stack(scales).float(),
        HISTORY: torch.stack(histories),
        INDEX: torch.zeros(len(histories), dtype=torch.int64),
        PENDING: torch.stack(pending).float(),
    }


def _vector(variables: Mapping[str, Any], name: str) -> Tensor:
    found = _array(variables, name)
    if found.dim() != 1 or len(found) < 1:
        raise CheckpointError(
            f"History of Keras has another layout: {name}", got={"shape": tuple(found.shape)}, expected="(length,)"
        )
    return _finite(found)


def _array(entries: Mapping[str, Any], name: str) -> Tensor:
    if name not in entries:
        raise CheckpointError(
            f"State of another library has no {name!r}",
            got={"names": sorted(entries)},
            fix="Give the state of one layer, with the names it has there",
        )
    value = entries[name]
    if isinstance(value, Tensor):
        return value.detach().float().cpu()
    return torch.from_numpy(np.array(value, dtype=np.float32))


def _finite(history: Tensor) -> Tensor:
    return history.nan_to_num(0.0, 0.0, 0.0)
