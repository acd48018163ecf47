"""Applying is all or nothing, keeps every identity, and can be taken back."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import nn

import narrowcast
from narrowcast.errors import ModelError, PlanError, UnsupportedError, WeightError
from narrowcast.torch import scheme
from tests.torch.models import Block, conv_net, ids, images, tiny_lm

EVERYWHERE = {"embedding": "int8", r"blocks/\d+/(attention|up|down)": "int8", r"blocks/\d+/scale": "bfloat16"}


def snapshot(model):
    """Everything that must not change when an apply fails: classes, dicts, tensors by identity and value."""
    return [
        (
            module,
            type(module),
            dict(module.__dict__),
            {n: (t, t.clone()) for n, t in module.named_parameters(recurse=False)},
        )
        for module in model.modules()
    ]


def assert_unchanged(before):
    for module, cls, namespace, parameters in before:
        assert type(module) is cls
        assert set(module.__dict__) == set(namespace)
        for name, (tensor, value) in parameters.items():
            assert getattr(module, name) is tensor
            assert torch.equal(tensor, value)
            assert tensor.dtype == value.dtype


def test_apply_returns_the_model_it_changed():
    model = tiny_lm()
    assert narrowcast.apply(model, EVERYWHERE) is model


def test_modules_keep_their_identity_and_class():
    model = tiny_lm()
    up, state = model.blocks[0].up, dict(model.named_modules())
    narrowcast.apply(model, EVERYWHERE)
    assert model.blocks[0].up is up
    assert isinstance(up, nn.Linear)
    assert all(module is state[name] for name, module in model.named_modules())


def test_a_map_leaves_what_it_does_not_name_as_it_is():
    model = tiny_lm()
    before = [entry for entry in snapshot(model) if isinstance(entry[0], nn.LayerNorm)]
    narrowcast.apply(model, {r"blocks/\d+/up": "int8"})
    assert_unchanged(before)


def test_a_single_policy_goes_to_every_site_that_can_carry_it():
    model = narrowcast.apply(tiny_lm(), "int8")
    carried = {row.path for row in narrowcast.plan_of(model) if row.given.quantization_mode}
    assert carried == {"embedding"} | {f"blocks/{i}/{name}" for i in (0, 1) for name in ("attention", "up", "down")}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_named_and_the_model_is_unchanged(bad):
    model = tiny_lm()
    with torch.no_grad():
        model.blocks[1].down.weight[3, 5] = bad
    before = snapshot(model)
    with pytest.raises(WeightError, match="Layer 'blocks/1/down' cannot carry 'int8_from_float32'"):
        narrowcast.apply(model, EVERYWHERE)
    for module, cls, _, _ in before:
        assert type(module) is cls


@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError])
def test_an_interrupt_at_any_moment_of_apply_leaves_the_model_whole(monkeypatch, kind):
    """Interrupts at each scheme's `prepare` in turn, then between the exchanges of `commit`."""
    interrupted = 0
    for moment in range(40):
        model = tiny_lm()
        before = snapshot(model)
        calls = 0

        def count(function, at=moment):
            def wrapper(*args, **kwargs):
                nonlocal calls
                calls += 1
                if calls - 1 == at:
                    raise kind
                return function(*args, **kwargs)

            return wrapper

        with monkeypatch.context() as patch:
            for carrier in {id(s): s for s in scheme._SCHEMES.values()}.values():
                patch.setattr(type(carrier), "prepare", count(type(carrier).prepare))
            try:
                narrowcast.apply(model, EVERYWHERE)
            except kind:
                interrupted += 1
                assert_unchanged(before)
            else:
                break
    assert interrupted >= 5


def test_an_interrupt_while_committing_rolls_back():
    model = tiny_lm()
    before = snapshot(model)
    changes = [scheme.Change.of(module) for module in model.modules()]
    for change in changes:
        change.new_dict["marked"] = True
    changes[0].new_data.append((model.embedding.weight, torch.zeros(40, 32, dtype=torch.bfloat16)))

    def interrupted():
        yield from changes[:4]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scheme.commit(interrupted())
    assert_unchanged(before)


def test_the_old_weights_are_released():
    model = tiny_lm()
    old = [weakref.ref(block.up.weight) for block in model.blocks]
    narrowcast.apply(model, {r"blocks/\d+/up": "int8"})
    assert [ref() for ref in old] == [None, None]


def test_a_plan_can_be_applied_and_is_kept_on_the_model():
    model = tiny_lm()
    chosen = narrowcast.plan(model, EVERYWHERE)
    narrowcast.apply(model, chosen)
    assert narrowcast.plan_of(model) == chosen


def test_planning_touches_nothing():
    model = tiny_lm()
    before = snapshot(model)
    narrowcast.plan(model, EVERYWHERE)
    assert_unchanged(before)


def test_a_plan_of_another_model_is_refused():
    chosen = narrowcast.plan(tiny_lm(width=64), EVERYWHERE)
    model = tiny_lm()
    with pytest.raises(PlanError, match="Plan was made for another model"):
        narrowcast.apply(model, chosen)


def test_a_plan_is_stale_once_the_model_carries_it():
    model = tiny_lm()
    chosen = narrowcast.plan(model, EVERYWHERE)
    narrowcast.apply(model, chosen)
    with pytest.raises(PlanError, match="or for this model before it changed"):
        narrowcast.apply(model, chosen)


def test_applying_the_same_map_twice_changes_nothing():
    model = narrowcast.apply(tiny_lm(), EVERYWHERE)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    narrowcast.apply(model, EVERYWHERE)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_another_mode_on_a_quantized_layer_is_refused():
    model = narrowcast.apply(tiny_lm(), {"blocks/0/up": "int8"})
    with pytest.raises(PlanError, match="dequantize"):
        narrowcast.apply(model, {"blocks/0/up": "int8/weight"})


@pytest.mark.parametrize(
    "policy", ["gptq/4/128", "awq/4/64", "int4/128", "mxfp8", "nvfp4", "mxfp4_from_mixed_bfloat16"]
)
def test_a_mode_that_is_not_carried_out_yet_says_so(policy):
    model = tiny_lm()
    before = snapshot(model)
    with pytest.raises(UnsupportedError, match="is not carried out on PyTorch yet"):
        narrowcast.apply(model, {"blocks/0/up": policy})
    assert_unchanged(before)


def test_batches_are_refused_while_no_mode_calibrates():
    with pytest.raises(UnsupportedError, match="No mode of this version calibrates"):
        narrowcast.apply(tiny_lm(), "int8", batches=[ids()])


def test_dequantize_gives_back_the_class_and_the_rounded_weights():
    model = tiny_lm()
    plain = copy.deepcopy(model)
    narrowcast.apply(model, EVERYWHERE | {r"blocks/\d+/scale": "keep"})
    rounded = model.blocks[0].up.weight.clone()
    assert narrowcast.dequantize(model) is model
    assert type(model.blocks[0].up) is nn.Linear
    assert isinstance(model.blocks[0].up.weight, nn.Parameter)
    assert torch.equal(model.blocks[0].up.weight, rounded)
    assert model.head.weight is model.embedding.weight
    assert list(model.state_dict()) == list(plain.state_dict())
    assert all(row.given.quantization_mode is None for row in narrowcast.plan_of(model))


def test_dequantize_goes_back_to_the_source_policy():
    model = narrowcast.apply(tiny_lm(), {"blocks/0/up": "int8_from_mixed_bfloat16", "blocks/1/up": "int8"})
    narrowcast.dequantize(model)
    assert model.blocks[0].up.dtype_policy.name == "mixed_bfloat16"
    assert model.blocks[0].up.weight.dtype == torch.float32
    assert model.blocks[0].up(torch.ones(1, 32)).dtype == torch.bfloat16
    assert not hasattr(model.blocks[1].up, "dtype_policy")


def test_int8_over_a_float_policy_starts_from_it():
    model = narrowcast.apply(tiny_lm(), {r"blocks/\d+/up": "mixed_bfloat16"})
    narrowcast.apply(model, {r"blocks/\d+/up": "int8"})
    assert model.blocks[0].up.dtype_policy.name == "int8_from_mixed_bfloat16"


def test_every_applied_site_really_runs_in_eval_mode():
    """PyTorch's fused encoder paths go around replaced modules unless they are turned off."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        expected = model(x)
    narrowcast.apply(model, {r"layers/\d+/(linear1|linear2|self_attn)": "int8"})
    ran = set()
    for row in narrowcast.plan_of(model):
        if row.given.quantization_mode:
            module = model.get_submodule(row.path.replace("/", "."))
            original = module.forward
            module.forward = lambda *args, _path=row.path, _forward=original, **kwargs: (
                ran.add(_path),
                _forward(*args, **kwargs),
            )[1]
    with torch.no_grad():
        result = model(x)
    assert ran == {row.path for row in narrowcast.plan_of(model) if row.given.quantization_mode}
    assert not torch.equal(result, expected)
    # Two layers of int8 projections of unit-variance activations: a few percent at most.
    assert (result - expected).norm() / expected.norm() < 0.05


def test_models_in_half_precision_are_ordinary_input():
    for dtype in (torch.bfloat16, torch.float16):
        model = conv_net().to(dtype)
        expected = model(images().to(dtype)).float()
        narrowcast.apply(model, "int8")
        assert model.head.dtype_policy.name == f"int8_from_{str(dtype).removeprefix('torch.')}"
        result = model(images().to(dtype))
        assert result.dtype == dtype
        # 8-bit weights in three layers: each rounds by at most 1/254 of its largest value.
        assert (result.float() - expected).norm() / expected.norm() < 0.05


def test_a_tied_embedding_and_head_share_one_copy_of_the_codes():
    model = narrowcast.apply(tiny_lm(), {"embedding": "int8"})
    assert model.embedding.weight_codes.data_ptr() == model.head.weight_codes.data_ptr()
    assert narrowcast.plan_of(model)["head"].bytes_after == 40 * 32 + 40 * 4


def test_two_rules_that_differ_on_a_tied_parameter_are_an_overlap():
    with pytest.raises(PlanError, match="embedding.*head|head.*embedding"):
        narrowcast.plan(tiny_lm(), {"embedding": "int8", "head": "bfloat16"})


def test_kept_layers_cast_their_inputs_where_dtypes_change_around_them():
    model = narrowcast.apply(tiny_lm(), {r"blocks/\d+/up": "bfloat16", r"blocks/\d+/down": "keep"})
    assert narrowcast.plan_of(model)["blocks/0/down"].casts_inputs
    out = model(ids())
    assert out.dtype == torch.float32
    assert model.blocks[0].down(torch.ones(1, 64, dtype=torch.bfloat16)).dtype == torch.float32


def test_a_plan_that_changes_no_activation_dtype_touches_no_kept_layer():
    model = tiny_lm()
    before = [entry for entry in snapshot(model) if type(entry[0]) in (Block, nn.LayerNorm)]
    narrowcast.apply(model, {r"blocks/\d+/up": "int8", r"blocks/\d+/norm": "keep"})
    assert_unchanged(before)


@pytest.mark.parametrize("first", ["mixed_bfloat16", "bfloat16"])
def test_dequantize_gives_back_the_float_policy_that_was_carried_before(first):
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    narrowcast.apply(model, {"0": first})
    expected = model[0](torch.ones(1, 16))
    narrowcast.apply(model, {"0": "int8"})
    narrowcast.dequantize(model)
    assert model[0].dtype_policy.name == first
    result = model[0](torch.ones(1, 16))
    assert result.dtype == expected.dtype
    # 8-bit weights and one rounding to bfloat16.
    torch.testing.assert_close(result, expected, rtol=2**-5, atol=2**-5)


@pytest.mark.parametrize("is_reloaded", [False, True])
@pytest.mark.parametrize(
    "policies",
    [
        ("float8_from_mixed_bfloat16", "float8/current"),
        ("float8_from_mixed_bfloat16", "float8/current", "float8"),
        ("float8_from_mixed_bfloat16", "float8/dynamic"),
        ("mixed_bfloat16", "float8", "float8/current"),
    ],
    ids="->".join,
)
def test_dequantize_gives_back_the_source_of_the_mode_that_another_took_over_from(policies, is_reloaded, tmp_path):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    for policy in policies:
        narrowcast.apply(model, {"0": policy})
    if is_reloaded:
        narrowcast.save(model, tmp_path / "saved")
        model = narrowcast.load(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)), tmp_path / "saved")
    narrowcast.dequantize(model)
    assert model[0].dtype_policy.name == "mixed_bfloat16"
    assert model[0](torch.ones(1, 16)).dtype is torch.bfloat16


def test_dequantize_leaves_no_policy_where_there_was_none_before_the_first_mode():
    model = nn.Sequential(nn.Linear(16, 16))
    for policy in ("float8", "float8/current", "float8/weight"):
        narrowcast.apply(model, policy)
    assert type(narrowcast.dequantize(model)[0]) is nn.Linear


def test_a_compiled_model_has_the_paths_of_the_model_it_was_made_of(tmp_path):
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)).eval()

    x = torch.ones(2, 64)
    compiled = torch.compile(build(), backend="eager")
    plain = compiled(x)
    assert [row.path for row in narrowcast.plan(compiled, {"0": "int8"})] == ["", "0", "1", "2"]
    assert narrowcast.apply(compiled, {"0": "int8"}) is compiled
    assert narrowcast.plan_of(compiled)["0"].status.value == "applied"
    assert "0" in narrowcast.tree(compiled)
    quantized = compiled(x)
    assert not torch.equal(quantized, plain)  # what was compiled before is not used again
    narrowcast.save(compiled, tmp_path / "saved")
    fresh, again = build(), torch.compile(build(), backend="eager")
    narrowcast.load(fresh, tmp_path / "saved")
    assert narrowcast.load(again, tmp_path / "saved") is again
    assert torch.equal(again(x), quantized)
    # Traced, scales multiply in another order than in the eager kernel.
    torch.testing.assert_close(fresh(x), quantized, rtol=1e-6, atol=1e-6)
    assert narrowcast.dequantize(compiled) is compiled
    assert type(compiled._orig_mod[0]) is nn.Linear


def test_a_plan_made_on_the_meta_device_applies_to_the_real_model():
    with torch.device("meta"):
        chosen = narrowcast.plan(nn.Sequential(nn.Linear(64, 64)), {"0": "int8"})
    model = narrowcast.apply(nn.Sequential(nn.Linear(64, 64)), chosen)
    assert model[0].dtype_policy.name == "int8_from_float32"


def test_quantizing_a_model_without_values_says_so():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ModelError, match="Layer '0' is on the meta device and has no values to quantize"):
        narrowcast.apply(model, "int8")
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize("policy", ["bfloat16", "int8", "mixed_bfloat16"])
def test_a_policy_applied_in_inference_mode_trains_outside_of_it(policy):
    model = nn.Sequential(nn.Linear(8, 8))
    with torch.inference_mode():
        narrowcast.apply(model, policy)
    x = torch.ones(2, 8, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    assert model[0].bias.grad is not None


def test_values_that_a_narrow_variable_dtype_cannot_hold_are_an_error():
    model = nn.Sequential(nn.Linear(4, 4))
    with torch.no_grad():
        model[0].weight[1, 2] = 1e6
    with pytest.raises(
        WeightError, match=r"Layer '0' cannot carry 'float16': parameter 'weight' holds values that float16"
    ):
        narrowcast.apply(model, {"0": "float16"})
    assert model[0].weight.dtype == torch.float32
    narrowcast.apply(model, {"0": "mixed_float16"})
