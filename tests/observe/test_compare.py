from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from narrowcast import frameworks
from narrowcast.errors import ModelError
from narrowcast.observe.compare import call, compare, each_batch, floats_in
from narrowcast.report.comparison import Comparison


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(inplace=True), nn.Linear(96, 32))


def _batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(16, 64, generator=generator) for _ in range(2)]


@pytest.fixture(scope="module")
def models() -> tuple[nn.Module, nn.Module]:
    model = _model()
    return model, frameworks.apply(copy.deepcopy(model), "int8")


@pytest.fixture(scope="module")
def found(models: tuple[nn.Module, nn.Module]) -> Comparison:
    return compare(*models, _batches(), budget_s=0.0)


def _relative(y: np.ndarray, r: np.ndarray) -> float:
    return float(np.linalg.norm(y - r) / np.linalg.norm(r))


def _numpy(tensors: list[Tensor]) -> np.ndarray:
    return torch.cat(tensors).detach().numpy().astype(np.float64)


def test_outputs_are_compared_over_all_batches(models: tuple[nn.Module, nn.Module], found: Comparison) -> None:
    with torch.inference_mode():
        r, y = (_numpy([model(x) for x in _batches()]) for model in models)
    # Both sum the same float64 squares; only the order of the additions differs.
    assert found.outputs.relative == pytest.approx(_relative(y, r), rel=1e-12)
    cosine = (y * r).sum() / (np.linalg.norm(y) * np.linalg.norm(r))
    assert found.outputs.cosine == pytest.approx(cosine, rel=1e-12)
    assert found.outputs.largest == pytest.approx(np.abs(y - r).max(), rel=1e-12)
    assert found.outputs.is_finite


def test_own_error_is_on_the_inputs_of_the_reference(models: tuple[nn.Module, nn.Module], found: Comparison) -> None:
    reference, other = models
    with torch.inference_mode():
        inner = [reference[1](reference[0](x)) for x in _batches()]  # type: ignore[index]
        r, y = (_numpy([model[2](x) for x in inner]) for model in (reference, other))  # type: ignore[index]
    assert found.layers[1].own == pytest.approx(_relative(y, r), rel=1e-12)


def test_accumulated_error_of_the_last_layer_is_that_of_the_outputs(found: Comparison) -> None:
    assert found.layers[1].accumulated == pytest.approx(found.outputs.relative, rel=1e-12)


def test_first_layer_accumulates_nothing_but_its_own_error(found: Comparison) -> None:
    # The ReLU after it works in place: its input must have been copied before.
    assert found.layers[0].accumulated == pytest.approx(found.layers[0].own, rel=1e-12)


def test_layers_with_a_policy_are_named_in_order(found: Comparison) -> None:
    assert [(layer.path, layer.policy, layer.num_calls) for layer in found.layers] == [
        ("0", "int8_from_float32", 2),
        ("2", "int8_from_float32", 2),
    ]


def test_bytes_are_those_of_the_state(models: tuple[nn.Module, nn.Module], found: Comparison) -> None:
    assert found.bytes_before == (64 * 96 + 96 + 96 * 32 + 32) * 4
    assert found.bytes_after == sum(t.numel() * t.element_size() for t in models[1].state_dict().values())


def test_a_shared_tensor_counts_once() -> None:
    model = _model()
    model.add_module("again", model[0])
    assert compare(model[:1], model[:1], [torch.ones(1, 64)], budget_s=0.0).bytes_before == (64 * 96 + 96) * 4


def test_model_against_itself_has_no_error() -> None:
    model = _model()
    found = compare(model, copy.deepcopy(model), _batches(), budget_s=0.0)
    assert (found.outputs.relative, found.outputs.largest, found.layers) == (0.0, 0.0, ())


def test_hooks_are_removed_and_training_flags_restored() -> None:
    model = _model().train()
    other = frameworks.apply(copy.deepcopy(model), "int8")
    compare(model, other, _batches(), budget_s=0.0)
    for one in (model, other):
        assert all(module.training for module in one.modules())
        assert not any(module._forward_hooks for module in one.modules())


def test_hooks_are_removed_after_an_error() -> None:
    model = _model()
    other = frameworks.apply(copy.deepcopy(model), "int8")
    with pytest.raises(RuntimeError):
        compare(model, other, [torch.ones(1, 3)])
    assert not any(module._forward_hooks for one in (model, other) for module in one.modules())


def test_layer_that_never_runs_has_no_error() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    model = Idle()
    found = compare(model, frameworks.apply(copy.deepcopy(model), "int8"), _batches(), budget_s=0.0)
    idle = found.layers[1]
    assert (idle.path, idle.own, idle.accumulated, idle.num_calls) == ("idle", None, None, 0)


def test_layer_used_twice_counts_both_calls() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x))

    model = Twice()
    found = compare(model, frameworks.apply(copy.deepcopy(model), "int8"), _batches(), budget_s=0.0)
    assert found.layers[0].num_calls == 4


def test_infinite_outputs_are_seen_and_json_has_no_infinity() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    nn.init.constant_(other.bias, math.inf)
    found = compare(model, other, [torch.ones(1, 2)], budget_s=0.0)
    assert not found.outputs.is_finite
    assert found.to_json()["outputs"]["relative"] is None


def test_no_batch_is_an_error() -> None:
    with pytest.raises(ModelError, match=r"no batch was given\. Return at least one batch"):
        compare(nn.Identity(), nn.Identity(), [])


def test_outputs_of_other_shapes_are_an_error() -> None:
    with pytest.raises(ModelError, match="Outputs of 'the model' have other shapes"):
        compare(nn.Linear(2, 2), nn.Linear(2, 3), [torch.ones(1, 2)])


def test_batches_are_called_by_their_kind() -> None:
    x = torch.ones(1)
    assert call(nn.Identity(), x) is x
    assert call(nn.Identity(), (x,)) is x
    assert call(nn.Identity(), {"input": x}) is x


def test_a_list_has_batches_and_anything_else_is_one() -> None:
    x = torch.ones(1)
    assert len(list(each_batch([x, x, x]))) == 3
    assert len(list(each_batch(iter([x, x])))) == 2
    assert list(each_batch((x, x))) == [(x, x)]
    assert list(each_batch({"input": x})) == [{"input": x}]


def test_inputs_of_no_known_kind_are_an_error() -> None:
    with pytest.raises(ModelError, match=r"Inputs cannot be given to a model\. Got type='int'"):
        list(each_batch(3))


def test_floats_are_found_however_they_are_nested() -> None:
    a, b = torch.ones(1), torch.ones(2, dtype=torch.bfloat16)
    found = list(floats_in({"x": (a, [None, torch.tensor(1)]), "y": {"z": b}}))
    assert found[0] is a
    assert found[1] is b
    assert len(found) == 2
