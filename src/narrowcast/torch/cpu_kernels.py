"""The 8-bit integer kernels of the CPU: what each derives from a weight, and which of them this machine uses.

Names of axes: r row (token), i inner, o output channel.

CPUs without an 8-bit dot product (VNNI) add pairs of products in 16 bits and saturate there, silently: 255 * 127 twice
is 64,770. There each weight is split into two addends whose neighbouring codes cannot overflow, and multiplied twice.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import lru_cache
from threading import Lock
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = [
    "FLIP",
    "CpuKernels",
    "Fbgemm",
    "Layout",
    "OneDnn",
    "Split",
    "as_float",
    "cpu_kernels",
    "has_dot_product",
    "split",
]

FLIP = torch.tensor(128, dtype=torch.uint8, device="cpu")
"""What codes are xored with to shift them by 128; a tensor, because a Python number costs 2 us more a call."""

_TRYING = Lock()


class Layout(Protocol):
    """A kernel with what it derived from one weight."""

    num_bytes: int

    def multiply(self, codes: Tensor) -> Tensor:
        """Returns `codes @ weight.T * scale`, float32 `(r, o)`; for `codes` see the function `multiply`."""
        ...


class OneDnn:
    """oneDNN's prepacked linear operator: unsigned codes (shifted by 128), weight scales fused.

    Exact only where the CPU has an 8-bit dot product. With signed codes it falls into a reference loop.
    """

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        self._packed = torch.ops.onednn.qlinear_prepack(weight.contiguous(), None)
        self._scale = scale.reshape(-1).clone()
        self._zeros = torch.zeros(weight.shape[0], dtype=torch.int64)
        self.num_bytes = weight.numel()

    def multiply(self, codes: Tensor) -> Tensor:
        """See `Layout.multiply`."""
        unsigned = codes if codes.dtype is torch.uint8 else codes.char().view(torch.uint8).bitwise_xor_(FLIP)
        return torch.ops.onednn.qlinear_pointwise.default(  # type: ignore[no-any-return]
            unsigned, 1.0, 128, self._packed, self._scale, self._zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )


class Fbgemm:
    """FBGEMM's prepacked linear operator, which takes and returns float32; less fixed cost a call than oneDNN's.

    Exact only where the CPU has an 8-bit dot product, or for weights in which no two neighbouring codes overflow.
    """

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        zeros = torch.zeros(weight.shape[0], dtype=torch.int64)
        engines = torch.backends.quantized
        with warnings.catch_warnings():
            # PyTorch 2.13 announces the end of its quantized tensors, the only way to pack for FBGEMM. Once they are
            # gone, `_fits` says no and the plain kernel takes over.
            warnings.filterwarnings("ignore", message=".*quantized tensor creation functions")
            quantized = torch._make_per_channel_quantized_tensor(
                weight.contiguous(), scale.reshape(-1).double(), zeros, 0
            )
            engine = engines.engine
            try:
                engines.engine = "fbgemm"
                self._packed = torch.ops.quantized.linear_prepack(quantized, None)
            finally:
                engines.engine = engine
        self.num_bytes = weight.numel()

    def multiply(self, codes: Tensor) -> Tensor:
        """See `Layout.multiply`."""
        return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default(  # type: ignore[no-any-return]
            as_float(codes), 1.0, 128, self._packed
        )


class Split:
    """FBGEMM on the two addends of a weight, for CPUs that saturate at 16 bits.

    The kernel adds `u1 * w1 + u2 * w2` of neighbouring inner positions in 16 bits, with `u` up to 255. That cannot
    overflow where `abs(w1 + w2) <= 128` for codes of one sign (of different signs it never does). What exceeds that is
    taken from the odd position and multiplied separately.
    """

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        safe, rest = split(weight)
        one = torch.ones_like(scale)
        self._scale = scale.reshape(-1).clone()
        self._safe = Fbgemm(safe, one)
        self._rest: Fbgemm | None = None
        self._odd_only = False
        if bool(rest.any()):
            odd = rest[:, 1::2].contiguous()
            # Alone, the odd positions become neighbours of each other: half the work where that cannot overflow either.
            self._odd_only = not bool(split(odd)[1].any())
            self._rest = Fbgemm(odd if self._odd_only else rest, one)
        self.num_bytes = self._safe.num_bytes + (self._rest.num_bytes if self._rest is not None else 0)

    def multiply(self, codes: Tensor) -> Tensor:
        """See `Layout.multiply`."""
        codes = as_float(codes)
        product = self._safe.multiply(codes)
        if self._rest is not None:
            product.add_(self._rest.multiply(codes[:, 1::2].contiguous() if self._odd_only else codes))
        return product.mul_(self._scale)


def split(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns two int8 addends of a weight: one in which no two neighbours overflow, and the rest.

    Args:
        weight: int8 codes -127..127, shape `(o, i)`.

    Returns:
        `safe` and `rest` with `safe + rest == weight`. In `safe`, positions `2 j` and `2 j + 1` have different signs or
        magnitudes that add up to at most 128; `rest` is zero at even positions.

    Example:
        >>> safe, rest = split(torch.tensor([[100, 100, -127, 127, -2]], dtype=torch.int8))
        >>> safe.tolist(), rest.tolist()
        ([[100, 28, -127, 127, -2]], [[0, 72, 0, 0, 0]])
    """
    wide = weight.to(torch.int16)
    rest = torch.zeros_like(weight)
    even, odd = wide[:, 0 : weight.shape[1] // 2 * 2 : 2], wide[:, 1::2]
    excess = ((even + odd).abs() - 128).clamp_min(0) * odd.sign()
    rest[:, 1::2] = torch.where(even * odd > 0, excess, torch.zeros_like(excess)).to(torch.int8)
    return weight - rest, rest


def as_float(codes: Tensor) -> Tensor:
    """Returns codes as whole numbers in float32: as they are, or from bytes that are shifted by 128."""
    return codes.float().sub_(128.0) if codes.dtype is torch.uint8 else codes


class CpuKernels(NamedTuple):
    """What runs on this machine's CPU.

    Args:
        multiplies_one_row: whether `torch._int_mm` is the fastest for one row.
        few: the layout for few products; see `narrowcast.torch.kernels.FEW_PRODUCTS`.
        many: the layout for more.
    """

    multiplies_one_row: bool
    few: Callable[[Tensor, Tensor], Layout] | None
    many: Callable[[Tensor, Tensor], Layout] | None


def has_dot_product() -> bool:
    """Says whether PyTorch finds an 8-bit dot product (VNNI) on this machine's CPU."""
    found = getattr(torch.cpu, "_is_vnni_supported", None)
    return found is not None and bool(found())


@lru_cache(maxsize=1)
def cpu_kernels() -> CpuKernels:
    """Returns the kernels for this machine's CPU. Each is tried for exactness first, once a process, in some 10 ms."""
    with _TRYING:
        if has_dot_product() and _fits(OneDnn):
            few = Fbgemm if _fits(Fbgemm) and _time_few(Fbgemm) * 1.2 < _time_few(OneDnn) else OneDnn
            return CpuKernels(True, few, OneDnn)
        if _fits(Split):
            return CpuKernels(False, Split, Split)
        return CpuKernels(False, None, None)


def _sample() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-127, 128, (16, 256), generator=generator).float()
    weight = torch.randint(-127, 128, (256, 256), generator=generator).to(torch.int8)
    codes[0], weight[0] = 127, 127  # the largest sums there are
    return codes, weight, torch.ones(256, 1)


def _fits(kernel: Callable[[Tensor, Tensor], Layout]) -> bool:
    """Whether the kernel exists in this build of PyTorch and is exact on this CPU."""
    codes, weight, scale = _sample()
    try:
        product = kernel(weight, scale).multiply(codes)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    return torch.equal(product, torch.mm(codes.double(), weight.double().t()).float())


def _time_few(kernel: Callable[[Tensor, Tensor], Layout]) -> float:
    codes, weight, scale = _sample()
    layout = kernel(weight, scale)
    layout.multiply(codes)
    best = float("inf")
    for _ in range(9):
        begin = time.perf_counter()
        layout.multiply(codes)
        best = min(best, time.perf_counter() - begin)
    return best
