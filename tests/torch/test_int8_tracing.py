"""int8 layers under torch.compile and torch.export: the same codes, and programs that run without this library."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

from narrowcast.torch import int8_gemm
from tests.torch.int8_cases import linear, quantized, randn


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


@pytest.fixture(scope="module", autouse=True)
def compiled_files(tmp_path_factory):
    """One folder for all tests, since the headers that inductor precompiles there take seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


def block(policy):
    torch.manual_seed(0)
    return nn.Sequential(quantized(linear(24, 40), policy), nn.GELU(), quantized(linear(40, 16), policy)).eval()


# Codes are the same; scales, sums and biases are combined in another order, by a few roundings of float32.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
of_torch_itself = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@needs_compiler
@of_torch_itself
@pytest.mark.parametrize("policy, shape", [("int8", (2, 3, 24)), ("int8/weight", (7, 24))])
def test_inductor_gives_what_eager_gives(policy, shape):
    model, x = block(f"{policy}_from_float32")[:1], randn(*shape)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True)
        torch.testing.assert_close(compiled(x), model(x), **TOLERANCE)


@needs_compiler
@of_torch_itself
def test_inductor_keeps_rows_that_are_not_finite_and_rows_of_zeros():
    model, x = block("int8_from_float32")[:1], randn(4, 24)
    x[0, 3], x[1, 5], x[2] = float("nan"), float("inf"), 0.0
    with torch.no_grad():
        y = torch.compile(model, fullgraph=True)(x)
        expected = model(x)
    assert not torch.isfinite(y[:2]).any()
    torch.testing.assert_close(y[2:], expected[2:], **TOLERANCE)


@pytest.mark.parametrize("policy", ["int8_from_float32", "int8/weight_from_float32"])
def test_compiled_gradients_are_those_of_eager(policy):
    model = block(policy)
    plain, traced = randn(5, 24).requires_grad_(), randn(5, 24).requires_grad_()
    model(plain).square().sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    torch.compile(model, backend="aot_eager", fullgraph=True)(traced).square().sum().backward()
    # A GELU between the layers is computed from sums in another order; a code beside a tie may change by one step.
    torch.testing.assert_close(traced.grad, plain.grad, rtol=0.01, atol=0.01 * plain.grad.abs().max().item())
    for name, parameter in model.named_parameters():
        scale = expected[name].abs().max().item()
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0.01, atol=0.01 * scale)


def test_one_graph_serves_every_number_of_rows():
    model = block("int8_from_float32")[:1]
    count = 0

    def backend(graph, inputs):
        nonlocal count
        count += 1
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for rows in (2, 3, 9, 33):
            torch.testing.assert_close(compiled(randn(rows, 24)), model(randn(rows, 24)), **TOLERANCE)
    assert count == 1


def test_a_compiled_layer_follows_values_that_are_loaded():
    model, other = quantized(linear(24, 40, seed=0)), quantized(linear(24, 40, seed=1))
    x = randn(3, 24)
    with torch.no_grad():
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        compiled(x)
        model.load_state_dict(other.state_dict())
        torch.testing.assert_close(compiled(x), other(x), **TOLERANCE)


def test_operators_pass_the_checks_of_pytorch():
    layer = quantized(linear(24, 40))
    codes = torch.randint(1, 256, (3, 24), dtype=torch.uint8)
    torch.library.opcheck(torch.ops.narrowcast.int8_product.default, (codes, layer.weight_codes, layer.weight_scale))
    given = (randn(2, 3, 24).requires_grad_(), layer.weight_codes, layer.weight_scale, layer.bias, torch.float32)
    # Its gradient is that through the dequantized weight and not the limit of differences, so that is not compared.
    torch.library.opcheck(torch.ops.narrowcast.int8_linear.default, given)


@pytest.mark.parametrize("has_dot_product", [True, False])
def test_an_exported_program_has_only_operators_of_pytorch(monkeypatch, has_dot_product):
    monkeypatch.setattr(int8_gemm, "has_dot_product", lambda: has_dot_product)
    model, x = block("int8_from_float32"), randn(4, 24)
    program = torch.export.export(model, (x,))
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not [target for target in targets if "narrowcast" in target]
    assert ("aten._int_mm.default" in targets) == has_dot_product
    torch.testing.assert_close(program.module()(x), model(x), rtol=0.01, atol=0.01)


def test_one_inner_feature_never_meets_the_operator_that_leaves_its_output_unset(monkeypatch):
    monkeypatch.setattr(int8_gemm, "has_dot_product", lambda: True)
    model, x = nn.Sequential(quantized(linear(1, 8))), randn(4, 1)
    program = torch.export.export(model, (x,))
    assert "_int_mm" not in program.graph_module.code
    torch.testing.assert_close(program.module()(x), model(x), **TOLERANCE)


def test_an_exported_program_takes_other_numbers_of_rows():
    model = block("int8_from_float32")[:1]
    rows = torch.export.Dim("rows", min=2, max=100)
    program = torch.export.export(model, (randn(4, 24),), dynamic_shapes=({0: rows},))
    torch.testing.assert_close(program.module()(randn(11, 24)), model(randn(11, 24)), **TOLERANCE)


def test_an_exported_program_runs_where_this_library_is_not_imported(tmp_path):
    model, x = block("int8_from_float32"), randn(4, 24)
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "model.pt2")
    with torch.no_grad():
        torch.save((x, model(x)), tmp_path / "values.pt")
    script = (
        "import sys, torch; x, y = torch.load(sys.argv[2]); m = torch.export.load(sys.argv[1]).module();"
        "torch.testing.assert_close(m(x), y, rtol=0.01, atol=0.01); print('narrowcast' in sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "model.pt2"), str(tmp_path / "values.pt")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert out.stdout == "False\n", out.stderr
