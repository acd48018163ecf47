"""Float policies at every kind of layer: values, dtypes and gradients, against float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from narrowcast.dtype_policies import get
from narrowcast.errors import UnsupportedError
from narrowcast.plan.carrier import Status
from narrowcast.plan.tree import Member, Parameter, Site
from narrowcast.torch import casting, gemm, scheme
from narrowcast.torch.scheme import Carried

from .floats import CASES, POLICIES, UNIT, dtypes_of, kind, leaves, make, put, reference

# PyTorch's own, once a process, for the plain layer too.
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")


@pytest.fixture(params=[(name, policy) for name in CASES for policy in POLICIES], ids=lambda case: "-".join(case))
def case(request):
    name, policy = request.param
    plain = make(name)
    return CASES[name], policy, plain, put(copy.deepcopy(plain), policy), CASES[name].inputs()


def bound(case, policy, scale):
    # Each rounding moves a value by half a unit in the last place of the largest one. Besides, what is accumulated in
    # float32 is off by a few of its units for each of at most some dozen terms.
    compute, _ = dtypes_of(policy)
    inner = UNIT[torch.float64 if compute is torch.float64 else torch.float32]
    return (case.roundings * UNIT[compute] + 40 * inner) * scale


def test_outputs_are_those_of_float64_on_the_rounded_operands(case):
    definition, policy, plain, carried, inputs = case
    exact, exact_inputs = reference(plain, inputs, definition, policy)
    for got, expected in zip(leaves(carried(*inputs)), leaves(exact(*exact_inputs)), strict=True):
        scale = max(expected.abs().max().item(), 1e-30)
        assert (got.double() - expected).abs().max().item() <= bound(definition, policy, scale)


def test_outputs_have_the_compute_dtype_and_losses_float32(case):
    definition, policy, _, carried, inputs = case
    compute, _ = dtypes_of(policy)
    expected = compute if not definition.returns_wide or compute is torch.float64 else torch.float32
    assert {leaf.dtype for leaf in leaves(carried(*inputs))} == {expected}


def test_parameters_and_gradients_have_the_variable_dtype(case):
    _, policy, _, carried, inputs = case
    _, variable = dtypes_of(policy)
    leaves_out = leaves(carried(*inputs))
    if any(leaf.requires_grad for leaf in leaves_out):
        sum(leaf.double().sum() for leaf in leaves_out if leaf.requires_grad).backward()
    for parameter in carried.parameters():
        assert parameter.dtype is variable
        if parameter.grad is not None:
            assert parameter.grad.dtype is variable


def test_gradients_are_those_of_float64(case):
    definition, policy, plain, carried, inputs = case
    exact, exact_inputs = reference(plain, inputs, definition, policy)
    for module, arguments in ((carried, inputs), (exact, exact_inputs)):
        out = [leaf for leaf in leaves(module(*arguments)) if leaf.requires_grad]
        if out:
            # Powers of two are the same cotangent in every dtype.
            sum((leaf.double() * 0.5).sum() for leaf in out).backward()
    compute, _ = dtypes_of(policy)
    for (name, parameter), expected in zip(carried.named_parameters(), exact.parameters(), strict=True):
        if expected.grad is None:
            assert parameter.grad is None, name
            continue
        scale = max(p.grad.abs().max().item() for p in exact.parameters() if p.grad is not None)
        # The backward pass rounds twice where the forward rounds once: the incoming and the outgoing gradient; and what
        # forward rounded has moved the point that the gradient is taken at.
        limit = (
            4 * definition.roundings * UNIT[compute]
            + 400 * UNIT[torch.float32 if compute is not torch.float64 else compute]
        ) * scale
        assert (parameter.grad.double() - expected.grad).abs().max().item() <= limit, name


def test_buffers_keep_their_dtype(case):
    _, _, plain, carried, inputs = case
    carried(*inputs)
    assert {n: b.dtype for n, b in carried.named_buffers()} == {n: b.dtype for n, b in plain.named_buffers()}


def test_state_dict_has_the_keys_of_the_plain_module(case):
    _, _, plain, carried, _ = case
    assert list(carried.state_dict()) == list(plain.state_dict())


def test_module_is_an_instance_of_its_own_class_and_shows_its_name(case):
    _, _, plain, carried, _ = case
    assert isinstance(carried, type(plain))
    assert repr(carried).splitlines()[0] == repr(plain).splitlines()[0]


def test_undo_gives_every_class_back_and_leaves_parameters_in_the_variable_dtype(case):
    _, policy, plain, carried, _ = case
    _, variable = dtypes_of(policy)
    before = dict(carried.named_parameters())
    scheme.commit(scheme.find(get(policy), kind(carried)).undo(carried))
    assert not any(isinstance(module, Carried) for module in carried.modules())
    assert all(parameter is before[name] for name, parameter in carried.named_parameters())
    assert all(parameter.dtype is variable for parameter in carried.parameters())
    assert sorted(vars(carried)) == sorted(vars(plain))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float16"])
def test_native_multiplication_and_widened_multiplication_agree(name, policy, monkeypatch):
    definition = CASES[name]
    widened = put(make(name), policy)
    native = copy.deepcopy(widened)
    inputs = definition.inputs()
    monkeypatch.setattr(gemm, "SLOW_ON_CPU", frozenset({torch.bfloat16, torch.float16}))
    expected = leaves(widened(*inputs))
    monkeypatch.setattr(gemm, "SLOW_ON_CPU", frozenset())
    for got, wide in zip(leaves(native(*inputs)), expected, strict=True):
        assert got.dtype is wide.dtype
        # Both are within the bound of the exact result.
        scale = wide.abs().max().item()
        assert (got.double() - wide.double()).abs().max().item() <= 2 * bound(definition, policy, scale)


def test_optimizer_built_before_keeps_its_parameters():
    linear = nn.Linear(6, 4)
    optimizer = torch.optim.AdamW(linear.parameters(), lr=0.1)
    put(linear, "mixed_bfloat16")
    linear(torch.ones(2, 6)).sum().backward()
    before = linear.weight.detach().clone()
    optimizer.step()
    assert optimizer.param_groups[0]["params"][0] is linear.weight
    assert not torch.equal(linear.weight, before)


def test_small_updates_are_kept_by_master_weights():
    # 1 + 2**-9 is 1 in bfloat16, which has 8 bits.
    linear = nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(linear.weight)
    put(linear, "mixed_bfloat16")
    with torch.no_grad():
        linear.weight += 2.0**-9
        linear.weight += 2.0**-9
    assert linear(torch.ones(1)).item() == 1 + 2.0**-8 or linear.weight.item() == 1 + 2.0**-8


def test_another_float_policy_takes_the_place_of_the_first():
    linear = put(put(nn.Linear(6, 4), "float64"), "mixed_float16")
    assert linear(torch.ones(2, 6)).dtype is torch.float16
    assert linear.weight.dtype is torch.float32
    assert type(linear).__mro__.count(nn.Linear) == 1


def test_tied_parameters_are_converted_once_and_stay_tied():
    embedding, head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
    head.weight = embedding.weight
    policy, shared = get("bfloat16"), {}
    changes = [
        change
        for module in (embedding, head)
        for change in scheme.find(policy, kind(module)).prepare(module, policy, shared=shared)
    ]
    scheme.commit(changes)
    assert head.weight is embedding.weight
    assert len({id(data) for change in changes for _, data in change.new_data}) == 1


def test_parameters_that_share_storage_still_do():
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = nn.Parameter(first.weight.data)
    policy, shared = get("bfloat16"), {}
    scheme.commit([c for m in (first, second) for c in scheme.find(policy, "linear").prepare(m, policy, shared=shared)])
    assert first.weight.data_ptr() == second.weight.data_ptr()


def test_module_on_the_meta_device_gets_its_policy():
    with torch.device("meta"):
        linear = put(nn.Linear(6, 4), "bfloat16")
    assert linear.weight.is_meta
    assert linear(torch.empty(2, 6, device="meta")).dtype is torch.bfloat16


def test_prepare_touches_nothing():
    linear = nn.Linear(6, 4)
    weight, state = linear.weight.data_ptr(), dict(vars(linear))
    casting.FloatScheme.prepare(scheme.find(get("bfloat16"), "linear"), linear, get("bfloat16"))
    assert type(linear) is nn.Linear
    assert vars(linear) == state
    assert linear.weight.data_ptr() == weight


@pytest.mark.parametrize(
    "policy, reason",
    [
        ("float8_e4m3fn", "PyTorch has no arithmetic in float8_e4m3fn"),
        ("int8", "int8 is not floating, and floats are never cast to what is not; the mode is int8_from_float32"),
        ("complex64", "complex64 is not floating, and floats are never cast to what is not"),
    ],
)
def test_dtype_without_arithmetic_is_refused(policy, reason):
    value = get(policy)
    member = Member(("a",), "linear", "Linear", (Parameter("weight", (4, 6), "float32"),))
    verdict = scheme.find(value, "linear").judge(Site((member,)), member, value)
    assert (verdict.status, verdict.reason) == (Status.NOT_A_TARGET, reason)
    with pytest.raises(UnsupportedError, match=reason):
        put(nn.Linear(6, 4), policy)


def judged(policy, kind, class_name="Linear", device="cpu", **details):
    parameters = (Parameter("weight", (4, 6), "float32"), Parameter("codes", (10,), "int32"))
    member = Member(("a",), kind, class_name, parameters, details=tuple(details.items()))
    value = get(policy)
    return scheme.find(value, kind).judge(Site((member,), device), member, value)


def test_verdict_counts_floating_bytes_in_the_variable_dtype():
    assert judged("mixed_bfloat16", "linear").bytes_after == 4 * 6 * 4 + 10 * 4
    assert judged("bfloat16", "linear").bytes_after == 4 * 6 * 2 + 10 * 4


@pytest.mark.parametrize(
    "policy, kind, kernel",
    [
        ("float32", "linear", "float32 gemm"),
        ("float64", "conv", "float64 convolution"),
        ("mixed_bfloat16", "embedding", "rows gathered, cast to bfloat16, float32 master weights"),
        ("mixed_float16", "norm", "float32 inside, float16 out, float32 master weights"),
        ("mixed_float16", "loss", "float32, float32 master weights"),
        ("bfloat16", "other", "its own code in bfloat16"),
        ("bfloat16", "container", ""),
    ],
)
def test_verdict_names_what_will_run(policy, kind, kernel):
    assert judged(policy, kind).kernel == kernel


def test_verdict_says_where_float32_stands_in_for_a_slow_multiplication(monkeypatch):
    monkeypatch.setattr(gemm, "SLOW_ON_CPU", frozenset({torch.float16}))
    slow = "float32 gemm rounded to float16 (this CPU has no fast float16 gemm), float32 master weights"
    assert judged("mixed_float16", "linear").kernel == slow
    assert judged("mixed_float16", "linear", device="cuda:0").kernel == "float16 gemm, float32 master weights"
    assert judged("mixed_bfloat16", "linear").kernel == "bfloat16 gemm, float32 master weights"


def test_verdict_of_a_custom_module_says_that_its_outputs_are_opaque():
    assert judged("float64", "other").reason == "opaque: returns what its own forward returns"
    sequential = judged("float64", "container", "torch.nn.modules.container.Sequential")
    assert sequential.reason == "its layers cast for themselves"


def test_verdict_passes_on_why_a_module_refuses():
    verdict = judged("float64", "other", refuses="a lazy module has no shapes yet")
    assert (verdict.status, verdict.reason) == (Status.NOT_A_TARGET, "a lazy module has no shapes yet")


def test_kernel_of_a_plain_layer_is_that_of_its_dtype(monkeypatch):
    monkeypatch.setattr(gemm, "SLOW_ON_CPU", frozenset({torch.float16}))
    member = Member(("a",), "linear", "Linear")
    assert casting.describe_kernel(member, "float32") == "float32 gemm"
    assert casting.describe_kernel(member, "float16") == "float16 gemm, slow on this CPU"


def test_kernel_of_a_layer_with_a_float_policy_is_that_of_the_policy():
    member = Member(("a",), "norm", "LayerNorm", (Parameter("weight", (4,), "float32"),), get("mixed_bfloat16"))
    assert casting.describe_kernel(member, "float32") == "float32 inside, bfloat16 out, float32 master weights"


def refused(module):
    with pytest.raises(UnsupportedError) as caught:
        put(module, "mixed_bfloat16")
    return str(caught.value)


def test_lazy_module_is_refused_until_it_has_shapes():
    lazy = nn.LazyLinear(4)
    assert "LazyLinear cannot carry a policy: a lazy module has no shapes yet" in refused(lazy)
    lazy(torch.ones(2, 6))
    assert put(lazy, "mixed_bfloat16")(torch.ones(2, 6)).dtype is torch.bfloat16


def test_script_module_is_refused():
    with pytest.warns(DeprecationWarning, match="torch.jit.script"):
        script = torch.jit.script(nn.Linear(6, 4))
    assert "a TorchScript module runs its compiled code" in refused(script)


def test_old_weight_norm_is_refused():
    with pytest.warns(FutureWarning):
        normed = torch.nn.utils.weight_norm(nn.Linear(6, 4))
    assert "a hook of torch.nn.utils computes its weight" in refused(normed)


def test_forward_replaced_on_the_instance_is_refused():
    linear = nn.Linear(6, 4)
    linear.forward = linear.forward
    assert "its forward was replaced on the instance" in refused(linear)


def test_parametrized_module_is_refused():
    linear = torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 4))
    assert "is parametrized already" in refused(linear)
