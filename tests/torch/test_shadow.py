"""Modules whose own forward runs on cast parameters: what it writes is kept, and nothing else changes."""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from .floats import put, randn


class Counting(nn.Module):
    """Writes everything a forward can write."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(randn(4, seed=1))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("last", torch.zeros(4))
        self.calls = 0
        self.log = []
        self.stale = True

    def forward(self, x):
        self.calls += 1
        self.log.append(self.weight.dtype)
        self.mean.add_(x.detach().float().mean(0))
        self.last = x.detach().float()[0]
        self.added = self.calls
        if self.stale:
            del self.stale
            self.stale = False
        return x * self.weight


def test_attributes_written_in_forward_are_kept():
    module = put(Counting(), "mixed_bfloat16")
    module(torch.ones(2, 4))
    module(torch.ones(2, 4))
    assert (module.calls, module.added, module.stale) == (2, 2, False)
    assert module.log == [torch.bfloat16, torch.bfloat16]


def test_buffers_written_in_forward_are_kept():
    module = put(Counting(), "mixed_bfloat16")
    module(torch.ones(2, 4))
    assert torch.equal(module.mean, torch.ones(4))
    assert torch.equal(module.last, torch.ones(4))
    assert list(module.state_dict()) == ["weight", "mean", "last"]


def test_attribute_deleted_in_forward_is_gone():
    class Deleting(Counting):
        def forward(self, x):
            del self.calls
            return x * self.weight

    module = put(Deleting(), "mixed_bfloat16")
    module(torch.ones(2, 4))
    assert not hasattr(module, "calls")


def test_parameter_assigned_in_forward_is_kept():
    class Assigning(Counting):
        def forward(self, x):
            self.weight = nn.Parameter(torch.full((4,), 2.0))
            self.extra = nn.Parameter(torch.zeros(1))
            return x * self.weight

    module = put(Assigning(), "mixed_bfloat16")
    module(torch.ones(2, 4))
    assert torch.equal(module.weight, torch.full((4,), 2.0))
    assert [name for name, _ in module.named_parameters()] == ["weight", "extra"]


def test_child_assigned_in_forward_is_kept():
    class Growing(Counting):
        def forward(self, x):
            self.child = nn.Identity()
            return x * self.weight

    module = put(Growing(), "mixed_bfloat16")
    module(torch.ones(2, 4))
    assert isinstance(module.child, nn.Identity)


def test_parameters_are_masters_after_the_call_and_after_an_error():
    class Failing(Counting):
        def forward(self, x):
            self.calls += 1
            raise RuntimeError("on purpose")

    module = put(Failing(), "mixed_bfloat16")
    weight = module.weight
    with pytest.raises(RuntimeError, match="on purpose"):
        module(torch.ones(2, 4))
    assert module.weight is weight
    assert weight.dtype is torch.float32
    assert module.calls == 1


def test_forward_that_calls_itself_works():
    class Recursive(Counting):
        def forward(self, x, depth=2):
            return x * self.weight if depth == 0 else self(x, depth - 1) + self.forward(x, 0)

    module = put(Recursive(), "mixed_bfloat16")
    assert module(torch.ones(2, 4)).dtype is torch.bfloat16


def test_module_used_twice_gets_the_sum_of_both_gradients():
    module = put(Counting(), "mixed_bfloat16")
    x = torch.ones(2, 4)
    (module(x).sum() + module(x).sum()).backward()
    assert torch.equal(module.weight.grad, torch.full((4,), 4.0))


def test_parameter_reassigned_from_outside_is_used():
    module = put(Counting(), "mixed_bfloat16")
    module.weight = nn.Parameter(torch.full((4,), 3.0))
    assert torch.equal(module(torch.ones(2, 4)), torch.full((2, 4), 3.0, dtype=torch.bfloat16))


def test_functional_call_replaces_parameters_for_the_call():
    module = put(Counting(), "mixed_bfloat16")
    out = torch.func.functional_call(module, {"weight": torch.full((4,), 3.0)}, (torch.ones(2, 4),))
    assert torch.equal(out, torch.full((2, 4), 3.0, dtype=torch.bfloat16))
    assert not torch.equal(module.weight, torch.full((4,), 3.0))


def test_integer_and_complex_parameters_are_left_alone():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))
            self.shift = nn.Parameter(torch.ones(4, dtype=torch.int32), requires_grad=False)

        def forward(self, x, ids):
            return x * self.weight, self.phase.dtype, self.shift.dtype, ids.dtype

    out, *dtypes = put(Mixed(), "mixed_bfloat16")(torch.ones(4), torch.ones(4, dtype=torch.uint8))
    assert [out.dtype, *dtypes] == [torch.bfloat16, torch.complex64, torch.int32, torch.uint8]


def test_absent_parameter_stays_absent():
    class Optional(Counting):
        def __init__(self):
            super().__init__()
            self.register_parameter("bias", None)

        def forward(self, x):
            return x * self.weight if self.bias is None else x

    assert put(Optional(), "mixed_bfloat16")(torch.ones(2, 4)).dtype is torch.bfloat16


def test_outputs_of_a_custom_module_are_those_of_its_author():
    class Wide(Counting):
        def forward(self, x):
            return {"wide": x.float() * 2, "narrow": x * self.weight, "count": 3}

    out = put(Wide(), "mixed_bfloat16")(torch.ones(2, 4))
    assert (out["wide"].dtype, out["narrow"].dtype, out["count"]) == (torch.float32, torch.bfloat16, 3)


def test_forward_that_writes_into_the_dict_it_was_given_reaches_the_caller():
    class Filling(Counting):
        def forward(self, cache):
            cache["count"] = 1
            return self.weight

    cache = {"ids": torch.arange(3)}
    put(Filling(), "mixed_bfloat16")(cache)
    assert cache["count"] == 1


def test_arguments_in_a_dataclass_are_cast():
    @dataclass
    class Batch:
        x: torch.Tensor
        ids: torch.Tensor

    class Reading(Counting):
        def forward(self, batch):
            return batch.x * self.weight, batch.ids

    x, ids = put(Reading(), "mixed_float16")(Batch(torch.ones(2, 4), torch.arange(3)))
    assert (x.dtype, ids.dtype) == (torch.float16, torch.int64)


def test_slots_are_read_and_written():
    class Slotted(nn.Module):
        __slots__ = ("__private", "count", "unset")

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.count = 5
            self.__private = 1

        def forward(self, x):
            self.count += self.__private
            return x * self.weight

    module = put(Slotted(), "mixed_bfloat16")
    assert module(torch.ones(4)).dtype is torch.bfloat16
    assert module.count == 6
    assert not hasattr(module, "unset")


def test_methods_and_properties_see_cast_parameters():
    class Methods(Counting):
        @property
        def doubled(self):
            return self.weight * 2

        def scale(self, x):
            return x * self.doubled

        def forward(self, x):
            return self.scale(x)

    assert put(Methods(), "mixed_bfloat16")(torch.ones(4)).dtype is torch.bfloat16


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float32"])
def test_names_of_the_author_are_not_taken(policy):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def _run(self, x):
            return self._call(x)

        def _call(self, x):
            return x * self.compute_dtype * self.weight

        compute_dtype = 2

        def forward(self, x):
            return self._run(x)

    assert torch.equal(put(Named(), policy)(torch.ones(4)).float(), torch.full((4,), 2.0))


def test_super_forward_sees_cast_parameters():
    class Child(Counting):
        def forward(self, x):
            return super().forward(x) + self.weight

    assert put(Child(), "mixed_bfloat16")(torch.ones(2, 4)).dtype is torch.bfloat16


def test_parametrization_registered_after_the_policy_is_seen_cast():
    class Doubled(nn.Module):
        def forward(self, x):
            return 2 * x

    module = put(Counting(), "mixed_bfloat16")
    torch.nn.utils.parametrize.register_parametrization(module, "weight", Doubled())
    out = module(torch.ones(2, 4))
    assert out.dtype is torch.bfloat16
    assert torch.equal(out[0], (2 * module.parametrizations.weight.original).bfloat16())
    out.sum().backward()
    assert module.parametrizations.weight.original.grad.dtype is torch.float32
    torch.nn.utils.parametrize.remove_parametrizations(module, "weight")
    assert torch.equal(module(torch.ones(2, 4)), out)


def test_lists_and_dicts_of_parameters_belong_to_their_module():
    class Holding(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = nn.ParameterList([torch.ones(4), torch.ones(4)])
            self.named = nn.ParameterDict({"a": torch.ones(4)})

        def forward(self, x):
            self.rows.append(torch.zeros(4))
            return [x * row for row in self.rows[:2]] + [x * self.named["a"]]

    module = put(Holding(), "mixed_bfloat16")
    out = module(torch.ones(4))
    assert {x.dtype for x in out} == {torch.bfloat16}
    sum(x.sum() for x in out).backward()
    assert module.rows[0].grad.dtype is module.named["a"].grad.dtype is torch.float32
    assert len(module.rows) == 3
    assert module.rows[2].dtype is torch.float32


def test_error_about_dtypes_says_which_module_and_what_may_be_the_cause():
    class Reaching(nn.Module):
        def __init__(self):
            super().__init__()
            self.child = nn.Linear(4, 4)

        def forward(self, x):
            return x @ self.child.weight

    with pytest.raises(RuntimeError, match="same dtype") as caught:
        put(Reaching(), "mixed_bfloat16")(torch.ones(2, 4))
    (note,) = caught.value.__notes__
    assert 'inside Reaching, whose own arithmetic runs in torch.bfloat16 under <DTypePolicy "mixed_bfloat16">' in note
    assert "reads the parameters of a child (`self.child.weight`)" in note


def test_other_errors_get_no_note():
    with pytest.raises(RuntimeError, match="must match the size") as caught:
        put(Counting(), "mixed_bfloat16")(torch.ones(2, 3))
    assert not hasattr(caught.value, "__notes__")


def test_threads_that_call_at_once_count_every_call_or_lose_only_counts_as_a_plain_module_does():
    module = put(Counting(), "mixed_bfloat16")
    x = randn(2, 4)
    expected = module(x)
    wrong = []

    def work():
        for _ in range(100):
            if not torch.equal(module(x), expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert module.weight.dtype is torch.float32
    assert len(module.log) == 301


def test_second_derivatives_pass_through_the_cast():
    module = put(Counting(), "mixed_float16")
    x = torch.ones(2, 4, requires_grad=True)
    (first,) = torch.autograd.grad((module(x) ** 2).sum(), x, create_graph=True)
    first.sum().backward()
    assert torch.allclose(module.weight.grad, 8 * module.weight, rtol=4 * 2.0**-11)  # four roundings to float16


def test_copy_made_between_calls_is_independent():
    module = put(Counting(), "mixed_bfloat16")
    module(torch.ones(2, 4))
    twin = copy.deepcopy(module)
    twin(torch.ones(2, 4))
    assert (module.calls, twin.calls) == (1, 2)


def test_mask_argument_saturates():
    class Masked(Counting):
        def forward(self, x, attention_mask=None):
            return (x * self.weight + attention_mask).softmax(-1)

    module = put(Masked(), "mixed_float16")
    mask = torch.full((2, 4), torch.finfo(torch.float32).min)
    for out in (module(torch.zeros(2, 4), mask), module(torch.zeros(2, 4), attention_mask=mask)):
        assert torch.equal(out, torch.full((2, 4), 0.25, dtype=torch.float16))
