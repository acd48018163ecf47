"""The stored form of a mode: which tensors a weight is kept as, and the way there and back.

It is what `state_dict` and files hold, the same on every device and in every framework. A tensor is named by the
parameter that it stands for and a part: `weight` becomes `weight_codes` and `weight_scale`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from narrowcast.dtype_policies import dtypes

__all__ = ["StoredForm", "of", "register"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StoredForm:
    """How the weights of one mode are kept.

    Args:
        parts: from the shape of a weight (output channels first), the shape and dtype of each tensor, by part.
        encode: from a weight, an array of floats with its output channels first, its tensors by part. Raises
            `WeightError` where the weight holds NaN or infinity.
        decode: from the tensors by part, the weight in float32.
    """

    parts: Callable[[Shape], Mapping[str, tuple[Shape, str]]]
    encode: Callable[[Any], dict[str, Any]]
    decode: Callable[[Mapping[str, Any]], Any]

    def tensors(self, parameter: str, shape: Shape) -> dict[str, tuple[Shape, str]]:
        """Returns the shape and dtype of each tensor that stands for `parameter`, by its full name.

        Example:
            >>> of("int8").tensors("weight", (4, 3))
            {'weight_codes': ((4, 3), 'int8'), 'weight_scale': ((4, 1), 'float32')}
        """
        return {f"{parameter}_{part}": kept for part, kept in self.parts(shape).items()}

    def num_bytes(self, shape: Shape) -> int:
        """Returns the bytes that a weight of this shape takes.

        Example:
            >>> of("int8").num_bytes((4, 3))
            28
        """
        return sum(_num_elements(kept) * dtypes.get(dtype).bits // 8 for kept, dtype in self.parts(shape).values())


_FORMS: dict[str, StoredForm] = {}


def register(modes: Iterable[str], form: StoredForm) -> None:
    """Registers the form of one mode, or of several that are kept alike. Called once a file, when it is imported."""
    for mode in modes:
        _FORMS[mode] = form


def of(mode: str) -> StoredForm:
    """Returns the stored form of a mode by its name without numbers (`int8`, `gptq`).

    Raises:
        KeyError: no form is registered for the mode.

    Example:
        >>> of("int8") is of("int8/weight")
        True
    """
    return _FORMS[mode]


def _num_elements(shape: Shape) -> int:
    count = 1
    for length in shape:
        count *= length
    return count
