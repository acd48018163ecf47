"""8-bit integer matrix multiplication: which kernel runs where, and where what it derives from a weight is kept.

Names of axes: r row (token), i inner, o output channel.

Every kernel computes the same: `codes_ri @ weight_oi.T * scale_o`, the sum exact in integers, then one rounding to
float32 and one multiplication. So which of them runs changes no bit of a result (sums above 2**24 aside, where the
kernels that add in float32 round more than once).

What a kernel derives from a weight, its *layout*, is kept on the weight's storage: it lives as long as the storage does
and is shared by all modules that share it; copies, pickles and files of the weight are without it.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowcast.torch.cpu_kernels import FLIP, Layout, as_float, cpu_kernels

__all__ = ["drop_layouts", "multiply", "multiply_plain", "num_layout_bytes"]

_LAYOUTS = "_narrowcast_layouts"
_LOCK = Lock()


def multiply(codes: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Returns `codes @ weight.T * scale` by the fastest kernel that is exact where the tensors are.

    Args:
        codes: shape `(r, i)`, contiguous, at least one row and column: whole numbers -127..127 in float32, or, shifted
            by 128, in uint8. A row that holds NaN or infinity instead gives some finite numbers.
        weight: int8, shape `(o, i)`.
        scale: float32, shape `(o, 1)`.

    Returns:
        A new tensor, float32, shape `(r, o)`.
    """
    if codes.is_cpu:
        return _multiply_cpu(codes, weight, scale)
    if codes.is_cuda and codes.shape[0] > 16 and weight.shape[0] % 8 == 0 and weight.shape[1] % 8 == 0:
        return _multiply_integer(codes, weight, scale)  # the sizes that cuBLAS takes
    return multiply_plain(codes, weight, scale)


def _multiply_cpu(codes: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    if type(weight) is not Tensor:  # a subclass, without data of its own perhaps
        return multiply_plain(codes, weight, scale)
    kernels = cpu_kernels()
    num_rows, num_inner = codes.shape
    if num_rows == 1 and num_inner > 1 and kernels.multiplies_one_row:
        # With one inner position `_int_mm` leaves its output as it was allocated.
        return _multiply_integer(codes, weight, scale)
    kernel = kernels.few if num_rows * weight.numel() <= kernels.few_products else kernels.many
    if kernel is None:
        return multiply_plain(codes, weight, scale)
    kept = weight.untyped_storage().__dict__.get(_LAYOUTS)
    if kept is not None:
        found = kept.get((kernel, weight.storage_offset(), weight.size(0)))
        if found is not None and found.state == _state(weight, scale):
            return found.layout.multiply(codes)  # type: ignore[no-any-return]
    return _new_layout(kernel, weight, scale).multiply(codes)


def multiply_plain(codes: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """The product by a float32 multiplication of the codes: any device and shape, no faster than float32.

    Numerics:
        Exact for up to 1,040 inner positions, where every sum of products is below 2**24; TensorFloat32 holds codes
        exactly.
    """
    finite = as_float(codes).nan_to_num(0.0, 0.0, 0.0)
    return torch.mm(finite, weight.float().t()).mul_(scale.reshape(-1))


def _multiply_integer(codes: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    signed = codes.bitwise_xor(FLIP).view(torch.int8) if codes.dtype is torch.uint8 else codes.char()
    return torch._int_mm(signed, weight.t()).float().mul_(scale.reshape(-1))


class _Kept(NamedTuple):
    """A layout, and the state of weight and scale that it was made from."""

    layout: Layout
    state: tuple[int, int, int]


def _new_layout(kernel: Callable[[Tensor, Tensor], Layout], weight: Tensor, scale: Tensor) -> Layout:
    """Makes a weight's layout for a kernel: at first use, and after the weight or its scale was written to."""
    key = kernel, weight.storage_offset(), weight.size(0)  # a slice of a weight has layouts of its own
    with _LOCK:
        kept: dict[Any, _Kept] = weight.untyped_storage().__dict__.setdefault(_LAYOUTS, {})
        state = _state(weight, scale)
        if key not in kept or kept[key].state != state:  # another thread may have been first
            with torch.inference_mode(False), torch.no_grad():
                kept[key] = _Kept(kernel(weight.detach(), scale.detach()), state)
        return kept[key].layout


def _state(weight: Tensor, scale: Tensor) -> tuple[int, int, int]:
    try:
        return weight._version, scale._version, scale.data_ptr()
    except RuntimeError:  # tensors made in inference mode count no writes
        return -1, -1, scale.data_ptr()


def num_layout_bytes(weight: Tensor) -> int:
    """Returns the bytes of the layouts that kernels keep for a weight at present."""
    kept: dict[Any, _Kept] = weight.untyped_storage().__dict__.get(_LAYOUTS, {})
    return sum(found.layout.num_bytes for found in list(kept.values()))


def drop_layouts(weight: Tensor) -> None:
    """Frees the layouts that kernels keep for a weight; they are made again when needed."""
    weight.untyped_storage().__dict__.pop(_LAYOUTS, None)
