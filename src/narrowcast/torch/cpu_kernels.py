"""The 8-bit integer kernels of the CPU: what each derives from a weight, and which of them this machine uses.

Names of axes: r row (token), i inner, o output channel.

CPUs without an 8-bit dot product (VNNI) add pairs of products in 16 bits and saturate there, silently: 255 * 127 twice
is 64,770. There each weight is spread over more inner positions, so that no two neighbours can overflow; see `spread`.
"""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable
from threading import Lock
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = [
    "FLIP",
    "MOST_FEW_PRODUCTS",
    "CpuKernels",
    "Fbgemm",
    "Layout",
    "OneDnn",
    "Spread",
    "as_float",
    "cpu_kernels",
    "has_dot_product",
    "spread",
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
        self._zeros = torch.zeros(weight.shape[0], dtype=torch.int64, device=weight.device)
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
        zeros = torch.zeros(weight.shape[0], dtype=torch.int64, device=weight.device)
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


class Spread:
    """FBGEMM on a weight that is spread over more inner positions, for CPUs that saturate at 16 bits.

    Takes one and a half times the multiplications for weights that are normally distributed, at most twice.
    """

    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        wide, positions = spread(weight)
        self._positions = positions if wide.shape[1] > weight.shape[1] else None
        self._packed = Fbgemm(wide, scale)
        self.num_bytes = self._packed.num_bytes

    def multiply(self, codes: Tensor) -> Tensor:
        """See `Layout.multiply`."""
        codes = as_float(codes)
        return self._packed.multiply(codes if self._positions is None else codes.index_select(1, self._positions))


def spread(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Spreads a weight over more inner positions, so that products of neighbours can be added in 16 bits.

    A kernel without an 8-bit dot product adds `u1 * w1 + u2 * w2` of neighbouring inner positions in 16 bits, with `u`
    up to 255. That cannot overflow where `abs(w1 + w2) <= 128` for codes of one sign; of different signs it never does.
    What exceeds that is taken from the second of the two and multiplied at a position of its own, behind the others.

    Args:
        weight: int8 codes -127..127, shape `(o, i)`.

    Returns:
        Codes, int8, shape `(o, j)`, j at least i and at most about 2 i; and for each of the j columns the position,
        int64, of the activation that it is multiplied by. The columns of one position add up to the weight's.

    Example:
        >>> wide, positions = spread(torch.tensor([[100, 100, -127, 127]], dtype=torch.int8))
        >>> wide.tolist(), positions.tolist()
        ([[100, 28, -127, 127, 72, 0]], [0, 1, 2, 3, 1, 0])
    """
    columns, positions = [], []
    rest, at = weight, torch.arange(weight.shape[1], device=weight.device)
    while at.numel():
        if rest.shape[1] % 2:  # what comes behind shall not become a neighbour of the last
            rest, at = F.pad(rest, (0, 1)), F.pad(at, (0, 1))
        wide = rest.to(torch.int16)
        first, second = wide[:, 0::2], wide[:, 1::2]
        excess = ((first + second).abs() - 128).clamp_min(0) * second.sign()
        excess = torch.where(first * second > 0, excess, 0)
        kept = torch.stack((first, second - excess), dim=2).flatten(1)
        columns.append(kept.to(torch.int8))
        positions.append(at)
        # Every excess is smaller than the code that it was part of, so this comes to an end; usually after two turns.
        is_used = (excess != 0).any(0)
        rest, at = excess[:, is_used], at[1::2][is_used]
    wide = torch.cat(columns, dim=1)
    if len(columns) == 1:
        wide = wide[:, : weight.shape[1]]
    return wide.contiguous(), torch.cat(positions)[: wide.shape[1]]


def as_float(codes: Tensor) -> Tensor:
    """Returns codes as whole numbers in float32: as they are, or from bytes that are shifted by 128."""
    return codes.float().sub_(128.0) if codes.dtype is torch.uint8 else codes


class CpuKernels(NamedTuple):
    """What runs on this machine's CPU.

    Args:
        multiplies_one_row: whether `torch._int_mm` is the fastest for one row.
        few: the kernel for up to `few_products` products (rows x in x out), where the fixed cost of a call decides.
        many: the kernel for more; `None` where there is none that is exact.
        few_products: see `few`.
    """

    multiplies_one_row: bool
    few: Callable[[Tensor, Tensor], Layout] | None
    many: Callable[[Tensor, Tensor], Layout] | None
    few_products: int = 0


MOST_FEW_PRODUCTS = 2**26
"""`few_products` is at most this: 32 rows of a layer of 1,024 x 2,048, beyond which no fixed cost is to be seen."""


def has_dot_product() -> bool:
    """Says whether PyTorch finds an 8-bit dot product (VNNI) on this machine's CPU."""
    found = getattr(torch.cpu, "_is_vnni_supported", None)
    return found is not None and bool(found())


@functools.lru_cache(maxsize=1)
def cpu_kernels() -> CpuKernels:
    """Returns the kernels for this machine's CPU. Each is tried for exactness first, once a process, in some 50 ms."""
    with _TRYING:
        if has_dot_product() and _fits(OneDnn):
            few_products = _crossover() if _fits(Fbgemm) else 0
            return CpuKernels(True, Fbgemm if few_products else OneDnn, OneDnn, few_products)
        if _fits(Spread):
            return CpuKernels(False, Spread, Spread)
        return CpuKernels(False, None, None)


def _sample(rows: int = 16, inner: int = 256, outer: int = 256) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(device="cpu").manual_seed(0)
    draw = functools.partial(torch.randint, -127, 128, generator=generator, device="cpu")
    codes, weight = draw((rows, inner)).float(), draw((outer, inner)).to(torch.int8)
    codes[0], weight[0] = 127, 127  # the largest sums there are
    return codes, weight, torch.ones(outer, 1, device="cpu")


def _fits(kernel: Callable[[Tensor, Tensor], Layout]) -> bool:
    """Whether the kernel exists in this build of PyTorch and is exact on this CPU."""
    codes, weight, scale = _sample()
    try:
        product = kernel(weight, scale).multiply(codes)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    return torch.equal(product, torch.mm(codes.double(), weight.double().t()).float())


def _crossover() -> int:
    """Up to how many products FBGEMM is faster than oneDNN, by the fixed costs and the rates of both at two sizes."""
    sizes = (16, 256, 256), (32, 1024, 1024)
    small, large = (rows * inner * outer for rows, inner, outer in sizes)
    lines = []
    for kernel in (Fbgemm, OneDnn):
        at_small, at_large = (_time(kernel, *size) for size in sizes)
        rate = (at_large - at_small) / (large - small)
        lines.append((at_small - rate * small, rate))
    (fixed, rate), (other_fixed, other_rate) = lines
    if fixed >= other_fixed:
        return 0
    if rate <= other_rate:
        return MOST_FEW_PRODUCTS
    return min(int((other_fixed - fixed) / (rate - other_rate)), MOST_FEW_PRODUCTS)


def _time(kernel: Callable[[Tensor, Tensor], Layout], rows: int, inner: int, outer: int) -> float:
    """The least time, in seconds, of one product."""
    codes, weight, scale = _sample(rows, inner, outer)
    layout = kernel(weight, scale)
    layout.multiply(codes)
    best = float("inf")
    for _ in range(9):
        begin = time.perf_counter()
        layout.multiply(codes)
        best = min(best, time.perf_counter() - begin)
    return best
