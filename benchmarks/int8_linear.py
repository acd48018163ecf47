"""Claim: int8 linear layers against float32 ones, against torchao's, and against the bare integer multiplication.

Each shape is measured in one process, all variants in turns, on fresh weights and activations with the distribution of
trained networks (normal). One row meets its weights cold: layers rotate over 256 MB, as in a model that generates text.
Errors are relative to the product in float64, on the data of the same run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

import narrowcast
from measure import cycled, note_if_busy
from narrowcast.numerics import relative_error
from narrowcast.observe.latency import measure
from narrowcast.torch import cpu_kernels
from result import write

CLAIM = (
    "An int8 linear layer: 3.5, 3.7 and 3.5 × faster than float32; 1.8 and 1.3 × faster than torchao at its error; "
    "at most 1.3 × the time of torch._int_mm"
)
COLD_BYTES = 256 * 2**20
NUM_THREADS = 2

# Rows, in, out; then what is wanted: times faster than float32, than torchao, and the most of the bare product's time.
SHAPES: dict[tuple[int, int, int], tuple[float, float | None, float | None]] = {
    (1, 4096, 4096): (3.5, None, None),
    (128, 1024, 4096): (3.7, 1.8, 1.3),
    (512, 2048, 2048): (3.5, 1.3, 1.3),
}


def float_layer(inner: int, outer: int) -> nn.Linear:
    layer = nn.Linear(inner, outer)
    nn.init.normal_(layer.weight, std=inner**-0.5)
    return layer


def int8_layer(layer: nn.Linear) -> nn.Module:
    twin = nn.Linear(layer.in_features, layer.out_features)
    twin.load_state_dict(layer.state_dict())
    model: nn.Module = narrowcast.apply(nn.Sequential(twin), "int8")[0]
    return model


def torchao_layer(layer: nn.Linear) -> nn.Module:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    twin = nn.Sequential(nn.Linear(layer.in_features, layer.out_features))
    twin.load_state_dict({f"0.{name}": value for name, value in layer.state_dict().items()})
    quantize_(twin, Int8DynamicActivationInt8WeightConfig())
    return twin


def without_gradients(layer: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], object]:
    def call() -> object:
        with torch.inference_mode():
            return layer(x)

    return call


def variants(num_rows: int, inner: int, outer: int) -> tuple[dict[str, Callable[[], object]], dict[str, float]]:
    """The calls to measure, and the error of each that quantizes."""
    x = torch.randn(num_rows, inner)
    is_cold = num_rows == 1
    num_floats = max(COLD_BYTES // (4 * inner * outer), 1) if is_cold else 1
    num_codes = max(COLD_BYTES // (inner * outer), 1) if is_cold else 1
    floats = [float_layer(inner, outer) for _ in range(num_floats)]
    codes = [int8_layer(floats[i % num_floats]) for i in range(num_codes)]
    calls = {
        "float32": cycled([without_gradients(layer, x) for layer in floats]),
        "narrowcast": cycled([without_gradients(layer, x) for layer in codes]),
    }
    exact = nn.functional.linear(x.double(), floats[0].weight.double(), floats[0].bias.double())
    with torch.inference_mode():
        errors = {"narrowcast": relative_error(codes[0](x), exact)}
        if not is_cold:
            theirs = torchao_layer(floats[0])
            errors["torchao"] = relative_error(theirs(x), exact)
            calls["torchao"] = without_gradients(theirs, x)
            rows = torch.randint(-127, 128, (num_rows, inner), dtype=torch.int8)
            weight = codes[0].weight_codes.t()
            calls["_int_mm"] = lambda: torch._int_mm(rows, weight)
    return calls, errors


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(NUM_THREADS)
    notes, rows, holds = note_if_busy(), [], True
    if not cpu_kernels.has_dot_product():
        notes.append(
            "This CPU has no 8-bit dot product (VNNI): exact 8-bit products take more multiplications, and "
            "torch._int_mm is a reference loop. The figures wanted are for CPUs that have one."
        )
    for (num_rows, inner, outer), (times_float32, times_torchao, most_of_bare) in SHAPES.items():
        calls, errors = variants(num_rows, inner, outer)
        found = measure(
            calls, num_rounds=200 if num_rows == 1 else 100, budget_s=40, num_warmups=20 if num_rows == 1 else 3
        )
        ms = {name: latency.median_ms for name, latency in found.items()}
        shape = f"{num_rows} × {inner} × {outer}"
        wants = [("float32", ms["float32"] / ms["narrowcast"], times_float32)]
        if times_torchao is not None:
            wants.append(("torchao", ms["torchao"] / ms["narrowcast"], times_torchao))
            holds = holds and errors["narrowcast"] <= errors["torchao"] * 1.01  # the same rounding on the same data
        for peer, ratio, wanted in wants:
            notes.append(f"{shape}: {ratio:.2f} × faster than {peer}, wanted {wanted} ×")
            holds = holds and ratio >= wanted
        if most_of_bare is not None:
            ratio = ms["narrowcast"] / ms["_int_mm"]
            notes.append(f"{shape}: {ratio:.2f} × the time of torch._int_mm, wanted at most {most_of_bare} ×")
            holds = holds and ratio <= most_of_bare
        rows.append(
            {"rows × in × out": shape}
            | {
                f"{name}, ms": f"{ms[name]:.3f}" if name in ms else ""
                for name in ("float32", "narrowcast", "torchao", "_int_mm")
            }
            | {
                f"error of {name}": f"{errors[name]:.5f}" if name in errors else ""
                for name in ("narrowcast", "torchao")
            }
        )
    write(__file__, claim=CLAIM, rows=rows, notes=notes, holds=holds, num_threads=NUM_THREADS)


if __name__ == "__main__":
    main()
