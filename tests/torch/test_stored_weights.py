"""What a quantized module holds, how it came to that, and how it goes back."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

from narrowcast.dtype_policies import get
from narrowcast.errors import CheckpointError, UnsupportedError, WeightError
from narrowcast.numerics import int8
from narrowcast.plan.carrier import Status
from narrowcast.torch import kernels, scheme
from tests.torch.int8_cases import linear, quantized, randn, verdict

MAKE = {
    "linear": lambda: linear(12, 5),
    "embedding": lambda: nn.Embedding(12, 5),
    "bag": lambda: nn.EmbeddingBag(12, 5),
    "conv": lambda: nn.Conv2d(6, 4, 3, groups=2),
    "transposed conv": lambda: nn.ConvTranspose1d(6, 4, 3, groups=2),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "cross attention": lambda: nn.MultiheadAttention(8, 2, kdim=6, vdim=4, bias=False),
}
CODES = {
    "linear": {"weight": (5, 12)},
    "embedding": {"weight": (12, 5)},
    "bag": {"weight": (12, 5)},
    "conv": {"weight": (4, 3, 3, 3)},
    "transposed conv": {"weight": (4, 3, 3)},
    "attention": {"in_proj_weight": (24, 8), "out_proj.weight": (8, 8)},
    "cross attention": {
        "q_proj_weight": (8, 8),
        "k_proj_weight": (8, 6),
        "v_proj_weight": (8, 4),
        "out_proj.weight": (8, 8),
    },
}


@pytest.fixture(params=MAKE)
def kind(request):
    torch.manual_seed(0)
    return request.param


@pytest.mark.parametrize("mode", ["int8", "int8/weight"])
def test_the_state_holds_codes_and_scales_output_channels_first(kind, mode):
    module = quantized(MAKE[kind](), f"{mode}_from_float32")
    state = module.state_dict()
    for name, shape in CODES[kind].items():
        assert name not in state
        assert (state[f"{name}_codes"].shape, state[f"{name}_codes"].dtype) == (shape, torch.int8)
        scale = state[f"{name}_scale"]
        assert (scale.shape, scale.dtype) == ((shape[0], *(1,) * (len(shape) - 1)), torch.float32)
        assert state[f"{name}_codes"].is_contiguous()


def test_the_weight_reads_as_the_dequantized_one_in_its_own_shape(kind):
    plain = MAKE[kind]()
    module = quantized(copy.deepcopy(plain))
    for name in CODES[kind]:
        owner, _, leaf = name.rpartition(".")
        weight = getattr(module.get_submodule(owner), leaf)
        original = plain.get_parameter(name)
        assert weight.shape == original.shape
        # Half a step of the largest magnitude of all.
        assert (weight - original).abs().max() <= original.abs().max() / 254 * 1.0001


def test_undoing_gives_the_class_the_order_and_the_rounded_weights(kind):
    plain = MAKE[kind]()
    module = quantized(copy.deepcopy(plain))
    owners = {name: module.get_submodule(name.rpartition(".")[0]) for name in CODES[kind]}
    rounded = {name: getattr(owner, name.rpartition(".")[2]) for name, owner in owners.items()}
    carrier = scheme.find(get("int8_from_float32"), "linear" if kind == "linear" else _kind_of(module))
    scheme.commit(carrier.undo(module))
    assert type(module) is type(plain)
    assert list(module.state_dict()) == list(plain.state_dict())
    assert set(module.__dict__) == set(plain.__dict__)
    for name, weight in rounded.items():
        parameter = module.get_parameter(name)
        assert torch.equal(parameter, weight)
        assert parameter.requires_grad
        assert parameter.is_contiguous()


def _kind_of(module):
    from narrowcast.torch.tree import tree

    return tree(module)[""].kind


def test_a_weight_that_was_frozen_is_frozen_again():
    module = linear(12, 5)
    module.weight.requires_grad_(False)
    carrier = scheme.find(get("int8_from_float32"), "linear")
    quantized(module)
    assert pickle.loads(pickle.dumps(module))._narrowcast_frozen == ("weight",)
    scheme.commit(carrier.undo(module))
    assert not module.weight.requires_grad
    assert module.bias.requires_grad


@pytest.mark.parametrize("kind", [kind for kind in MAKE if "transposed" not in kind])  # whose axes are exchanged first
def test_codes_are_those_of_the_definition(kind):
    torch.manual_seed(0)
    plain = MAKE[kind]()
    module = quantized(copy.deepcopy(plain))
    state = module.state_dict()
    for name in CODES[kind]:
        parts = int8.encode(plain.get_parameter(name).detach().numpy())
        assert (state[f"{name}_codes"].numpy() == parts["codes"]).all()
        assert (state[f"{name}_scale"].numpy() == parts["scale"]).all()


@pytest.mark.parametrize(
    "cast", [lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.double(), lambda m: m.float()]
)
def test_casting_the_module_changes_nothing(kind, cast):
    module = quantized(MAKE[kind]())
    before = {name: value.clone() for name, value in module.state_dict().items()}
    cast(module)
    after = module.state_dict()
    assert all(after[name].dtype == before[name].dtype and torch.equal(after[name], before[name]) for name in before)


def test_the_old_weight_is_released(kind):
    module = MAKE[kind]()
    old = [weakref.ref(module.get_parameter(name)) for name in CODES[kind]]
    quantized(module)
    gc.collect()
    assert [ref() for ref in old] == [None] * len(old)


def test_layouts_are_neither_copied_nor_pickled_nor_in_the_state():
    module = quantized(linear(64, 32))
    size = len(pickle.dumps(module))
    module(randn(3, 64))
    used = kernels.num_layout_bytes(module.weight_codes)
    assert len(pickle.dumps(module)) == size
    assert kernels.num_layout_bytes(copy.deepcopy(module).weight_codes) == 0
    assert set(module.state_dict()) == {"bias", "weight_codes", "weight_scale"}
    assert kernels.num_layout_bytes(module.weight_codes) == used


def test_values_that_are_loaded_are_the_ones_that_run():
    module, other = quantized(linear(12, 5, seed=0)), quantized(linear(12, 5, seed=1))
    x = randn(3, 12)
    module(x)
    expected = other(x)
    module.load_state_dict(other.state_dict())
    assert torch.equal(module(x), expected)
    third = quantized(linear(12, 5, seed=2))
    third(x)
    third.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    assert torch.equal(third(x), expected)


def test_the_policy_is_shown():
    assert repr(quantized(linear(12, 5))) == (
        "Linear(in_features=12, out_features=5, bias=True, policy=int8_from_float32)"
    )


def test_assigning_a_weight_is_refused():
    module = quantized(linear(12, 5))
    with pytest.raises(KeyError, match="weight"):
        module.weight = nn.Parameter(torch.zeros(5, 12))


def tied_pair():
    embedding, head = nn.Embedding(12, 5), nn.Linear(5, 12, bias=False)
    head.weight = embedding.weight
    shared: dict = {}
    policy = get("int8_from_float32")
    changes = [
        *scheme.find(policy, "embedding").prepare(embedding, policy, shared=shared),
        *scheme.find(policy, "linear").prepare(head, policy, shared=shared),
    ]
    scheme.commit(changes)
    return embedding, head


def test_tied_modules_share_one_copy_of_the_codes():
    embedding, head = tied_pair()
    assert embedding.weight_codes is head.weight_codes
    assert embedding.weight_scale is head.weight_scale


def test_dequantized_ties_are_ties_again():
    embedding, head = tied_pair()
    shared: dict = {}
    policy = get("int8_from_float32")
    scheme.commit(scheme.find(policy, "embedding").undo(embedding, shared=shared))
    scheme.commit(scheme.find(policy, "linear").undo(head, shared=shared))
    assert embedding.weight is head.weight


@pytest.mark.parametrize("move", [lambda m: m.to_empty(device="cpu"), lambda m: m.to("meta"), copy.deepcopy])
def test_ties_survive_moves_and_copies(move):
    model = move(nn.ModuleList(tied_pair()))
    codes = [module.weight_codes for module in model]
    assert codes[0].untyped_storage()._cdata == codes[1].untyped_storage()._cdata
    assert codes[0].shape == codes[1].shape
    scales = [module.weight_scale for module in model]
    assert scales[0].untyped_storage()._cdata == scales[1].untyped_storage()._cdata


def test_a_move_does_not_keep_what_it_made_alive():
    model = nn.ModuleList(tied_pair())
    old = model[0].weight_codes
    model.to_empty(device="cpu")
    moved = weakref.ref(model[0].weight_codes.untyped_storage())
    del model
    gc.collect()
    assert moved() is None
    assert old is not None


def test_modules_that_were_never_tied_do_not_become_so():
    model = nn.ModuleList([quantized(linear(12, 5)), quantized(linear(12, 5))]).to_empty(device="cpu")
    assert model[0].weight_codes.data_ptr() != model[1].weight_codes.data_ptr()


def test_a_stored_form_is_taken_as_it_is_and_taken_out():
    source = quantized(linear(12, 5, seed=0))
    stored = dict(source.state_dict())
    module = quantized(linear(12, 5, seed=1), stored=stored)
    assert set(stored) == {"bias"}
    assert module.weight_codes is not None
    assert torch.equal(module.weight_codes, source.weight_codes)
    assert torch.equal(module.weight_scale, source.weight_scale)


def test_a_stored_form_on_the_meta_device_keeps_its_own_device():
    source = quantized(linear(12, 5))
    with torch.device("meta"):
        module = nn.Linear(12, 5)
    quantized(module, stored=dict(source.state_dict()))
    assert module.weight_codes.device.type == "cpu"


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda s: s.pop("weight_scale"), "Tensor weight_scale is missing. Expected float32, shape (5, 1)."),
        (
            lambda s: s.update(weight_codes=torch.zeros(5, 11, dtype=torch.int8)),
            "Tensor weight_codes is not the one that the layer needs. Got shape=(5, 11), dtype='int8'. Expected int8, "
            "shape (5, 12).",
        ),
        (
            lambda s: s.update(weight_scale=torch.ones(5, 1, dtype=torch.float16)),
            "Tensor weight_scale is not the one that the layer needs. Got shape=(5, 1), dtype='float16'. Expected "
            "float32, shape (5, 1).",
        ),
    ],
)
def test_a_stored_form_that_does_not_fit_is_refused(change, message):
    stored = dict(quantized(linear(12, 5)).state_dict())
    change(stored)
    with pytest.raises(CheckpointError) as info:
        quantized(linear(12, 5), stored=stored)
    assert str(info.value) == message


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_parameter_that_is_not_finite_is_named(kind, bad):
    module = MAKE[kind]()
    name = list(CODES[kind])[-1]
    with torch.no_grad():
        module.get_parameter(name).view(-1)[3] = bad
    with pytest.raises(WeightError, match=f"Parameter '{name}' holds NaN or infinity. Got num_not_finite=1"):
        quantized(module)
    assert type(module) in (
        nn.Linear,
        nn.Embedding,
        nn.EmbeddingBag,
        nn.Conv2d,
        nn.ConvTranspose1d,
        nn.MultiheadAttention,
    )


def test_preparing_touches_nothing(kind):
    module = MAKE[kind]()
    before = {name: (p, p.detach().clone()) for name, p in module.named_parameters()}
    namespace = dict(module.__dict__)
    policy = get("int8_from_bfloat16")
    scheme.find(policy, _kind_of(module)).prepare(module, policy)
    assert module.__dict__ == namespace
    for name, (parameter, value) in before.items():
        assert module.get_parameter(name) is parameter
        assert torch.equal(parameter, value)


def test_quantizing_in_inference_mode_gives_tensors_that_can_be_saved_for_backward():
    with torch.inference_mode():
        module = quantized(linear(12, 5))
    x = randn(3, 12).requires_grad_()
    if module.bias.is_inference():
        module.bias = nn.Parameter(module.bias.clone())
    module(x).sum().backward()
    assert x.grad is not None


def test_a_source_without_arithmetic_is_refused():
    with pytest.raises(UnsupportedError, match="Linear cannot carry int8: PyTorch has no arithmetic in float8_e4m3fn"):
        quantized(linear(12, 5), "int8_from_float8_e4m3fn")
    assert verdict(linear(12, 5), "int8_from_float8_e4m3fn").status is Status.NOT_A_TARGET


def test_dequantizing_what_was_parametrized_since_is_refused():
    module = quantized(linear(12, 5))
    nn.utils.parametrize.register_parametrization(module, "bias", nn.Identity())
    carrier = scheme.find(get("int8_from_float32"), "linear")
    with pytest.raises(UnsupportedError, match="its class was changed since"):
        carrier.undo(module)


def test_hooks_and_other_attributes_stay(kind):
    module = MAKE[kind]()
    module.note = "mine"
    seen = []
    module.register_forward_pre_hook(lambda *_: seen.append(1))
    hooks = module._forward_pre_hooks
    quantized(module)
    assert module.note == "mine"
    assert module._forward_pre_hooks is hooks


def test_a_float_policy_gives_way_to_int8_from_it():
    module = linear(12, 5)
    policy = get("mixed_bfloat16")
    scheme.commit(scheme.find(policy, "linear").prepare(module, policy))
    quantized(module, "int8_from_mixed_bfloat16")
    assert module.dtype_policy == get("int8_from_mixed_bfloat16")
    assert module(randn(2, 12)).dtype == torch.bfloat16
    assert scheme.original_class(module) is nn.Linear
