"""What every module under a float policy holds to: autocast, `.half()`, loading, drift, signatures, hooks."""

from __future__ import annotations

import inspect
import subprocess
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from narrowcast.dtype_policies import get
from narrowcast.errors import ModelError, UnsupportedError
from narrowcast.torch import apply, scheme
from narrowcast.torch.scheme import Carried

from .floats import put, put_on_all, randn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.linear = nn.Linear(6, 4)

    def forward(self, x, scale: float = 1.0, *, mask=None):
        """Computes."""
        return self.linear(self.norm(x)) * scale


@pytest.mark.parametrize("policy", ["mixed_float16", "float32", "float64"])
@pytest.mark.parametrize("outer", [torch.bfloat16, torch.float16])
def test_outer_autocast_does_not_overrule(policy, outer):
    linear = put(nn.Linear(6, 4), policy)
    x = randn(3, 6)
    expected = linear(x)
    with torch.autocast("cpu", outer):
        got = linear(x)
    assert got.dtype is expected.dtype
    assert torch.equal(got, expected)


def test_autocast_is_on_again_after_the_call():
    linear = put(nn.Linear(6, 4), "float32")
    with torch.autocast("cpu", torch.bfloat16):
        linear(randn(3, 6))
        assert (randn(2, 2) @ randn(2, 2)).dtype is torch.bfloat16


def test_plain_layer_beside_one_with_a_policy_still_follows_autocast():
    model = nn.Sequential(put(nn.Linear(6, 6), "float32"), nn.Linear(6, 4))
    with torch.autocast("cpu", torch.bfloat16):
        assert model(randn(3, 6)).dtype is torch.bfloat16


@pytest.mark.parametrize("convert", [lambda m: m.half(), lambda m: m.to(torch.float64), lambda m: m.bfloat16()])
def test_converting_the_model_converts_only_what_has_no_policy(convert):
    model = Net()
    put(model.linear, "mixed_bfloat16")
    weight = model.linear.weight.detach().clone()
    convert(model)
    assert torch.equal(model.linear.weight, weight)
    assert model.norm.weight.dtype is not torch.float32


def test_converting_a_norm_with_a_policy_leaves_its_statistics():
    norm = put(nn.BatchNorm1d(6), "mixed_float16").half()
    assert norm.running_mean.dtype is torch.float32
    assert norm.num_batches_tracked.dtype is torch.int64


def test_gradient_keeps_its_dtype_when_the_model_is_converted():
    linear = put(nn.Linear(6, 4), "mixed_bfloat16")
    linear(randn(3, 6)).sum().backward()
    linear.half()
    assert linear.weight.grad.dtype is torch.float32


def test_device_and_memory_format_take_effect():
    conv = put(nn.Conv2d(4, 4, 3), "mixed_bfloat16")
    conv.to(memory_format=torch.channels_last)
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)
    conv.to("meta", torch.float16)
    assert (conv.weight.device.type, conv.weight.dtype) == ("meta", torch.float32)
    conv.to_empty(device="cpu")
    assert (conv.weight.device.type, conv.weight.dtype) == ("cpu", torch.float32)


def test_children_that_belong_to_the_site_are_kept_too():
    attention = put(nn.MultiheadAttention(8, 2), "mixed_bfloat16").half()
    assert attention.out_proj.weight.dtype is torch.float32


def test_loading_by_assignment_keeps_the_variable_dtype():
    linear = put(nn.Linear(6, 4), "mixed_bfloat16")
    state = {name: value.half() for name, value in nn.Linear(6, 4).state_dict().items()}
    linear.load_state_dict(state, assign=True)
    assert linear.weight.dtype is torch.float32
    assert torch.equal(linear.weight, state["weight"].float())


def test_parameter_converted_behind_the_policy_is_an_error_that_names_the_layer():
    linear = put(nn.Linear(6, 4), "mixed_bfloat16")
    linear.weight.data = linear.weight.data.half()
    with pytest.raises(ModelError) as caught:
        linear(randn(3, 6))
    assert str(caught.value) == (
        "Parameter 'weight' of Linear(in_features=6, out_features=4, bias=True) has not the dtype of its policy. "
        "Got dtype='float16'. Expected float32, the variable dtype of <DTypePolicy \"mixed_bfloat16\">. "
        "Call `.float()` on the module, which brings its parameters back to the policy's dtype."
    )


@pytest.mark.parametrize("make", [lambda: nn.GRUCell(6, 4), lambda: nn.Embedding(9, 4), lambda: nn.LayerNorm(6)])
def test_drift_is_found_at_every_kind(make):
    module = put(make(), "mixed_bfloat16")
    for parameter in module.parameters():
        parameter.data = parameter.data.half()
    with pytest.raises(ModelError, match="has not the dtype of its policy"):
        module(torch.tensor([1]) if isinstance(module, nn.Embedding) else randn(3, 6))


def test_any_conversion_mends_drift():
    linear = put(nn.Linear(6, 4), "mixed_bfloat16")
    linear.weight.data = linear.weight.data.half()
    linear.float()
    assert linear(randn(3, 6)).dtype is torch.bfloat16
    assert linear.weight.dtype is torch.float32


def test_parameters_that_another_library_holds_in_the_compute_dtype_are_taken():
    # As FSDP's mixed precision does for the time of a forward.
    linear = put(nn.Linear(6, 4), "mixed_bfloat16")
    half = {name: value.bfloat16() for name, value in linear.named_parameters()}
    x = randn(3, 6)
    assert torch.equal(torch.func.functional_call(linear, half, (x,)), linear(x))


def test_forward_keeps_its_signature_and_text():
    model = put(Net(), "mixed_bfloat16")
    assert inspect.signature(model.forward) == inspect.signature(Net().forward)
    assert model.forward.__doc__ == "Computes."


def test_inputs_by_name_are_cast():
    assert put(nn.Linear(6, 4), "float64")(input=randn(3, 6)).dtype is torch.float64


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_wrong_arguments_are_the_type_error_of_the_plain_layer(policy):
    with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given"):
        put(nn.Linear(6, 4), policy)(randn(3, 6), 1)


def test_module_made_from_the_class_of_a_carrying_one_is_plain():
    linear = put(nn.Linear(6, 4), "mixed_bfloat16")
    made = type(linear)(3, 2, bias=False)
    assert type(made) is nn.Linear
    assert made.weight.shape == (2, 3)


def test_slice_of_a_sequential_is_plain_and_holds_the_same_layers():
    model = put_on_all(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4)), "mixed_bfloat16")
    part = model[:1]
    assert type(part) is nn.Sequential
    assert part[0] is model[0]


def test_sequential_leaves_casting_to_its_layers():
    # In float16 the input of the norm would be infinite.
    model = put_on_all(nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 2)), "mixed_float16")
    assert torch.isfinite(model(torch.tensor([[7e4, 8e4]]))).all()


def test_register_of_subclasses_does_not_learn_of_carrying_classes():
    seen = []

    class Registering(nn.Module):
        def __init_subclass__(cls, *, name, **kwargs):
            super().__init_subclass__(**kwargs)
            seen.append(name)

        def forward(self, x):
            return x

    class Named(Registering, name="named"):
        pass

    assert put(Named(), "float64")(randn(2)).dtype is torch.float64
    assert seen == ["named"]


def test_user_hooks_see_the_inputs_as_given_and_the_outputs_as_cast():
    linear = put(nn.Linear(6, 4), "mixed_bfloat16")
    seen = []
    linear.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    linear.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    linear.register_full_backward_hook(lambda module, given, out: seen.append(out[0].dtype))
    linear(randn(3, 6).requires_grad_()).sum().backward()
    assert seen == [torch.float32, torch.bfloat16, torch.bfloat16]


def test_parametrization_registered_after_the_policy_works_and_is_removed():
    linear = put(nn.Linear(6, 4), "mixed_bfloat16")
    torch.nn.utils.parametrizations.weight_norm(linear)
    x = randn(3, 6)
    out = linear(x)
    assert out.dtype is torch.bfloat16
    out.sum().backward()
    assert linear.parametrizations.weight.original1.grad.dtype is torch.float32
    torch.nn.utils.parametrize.remove_parametrizations(linear, "weight")
    assert isinstance(linear, Carried)
    assert torch.allclose(linear(x), out, atol=2.0**-7)


def test_policy_cannot_be_taken_from_under_a_parametrization():
    linear = put(nn.Linear(6, 4), "mixed_bfloat16")
    torch.nn.utils.parametrizations.weight_norm(linear)
    with pytest.raises(UnsupportedError, match="its class was changed after it got this one"):
        scheme.find(get("float32"), "linear").undo(linear)


@pytest.fixture
def mesh(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        yield init_device_mesh("cpu", (1,))
        dist.destroy_process_group()


@pytest.mark.parametrize("mixed", [MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)])
def test_fully_sharded_training_on_top_works(mesh, mixed):
    model = nn.Sequential(put(nn.Linear(6, 4), "mixed_bfloat16"), put(nn.LayerNorm(4), "mixed_bfloat16"))
    x = randn(3, 6)
    expected = model(x)
    fully_shard(model[0], mesh=mesh, mp_policy=mixed)
    fully_shard(model, mesh=mesh, mp_policy=mixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    out = model(x)
    out.sum().backward()
    optimizer.step()
    # Where torch rounds the norm's parameters too, its output moves by up to two roundings to bfloat16.
    limit = 0 if mixed.param_dtype is None else 2 * 2.0**-8 * expected.abs().max().item()
    assert (out.float() - expected.float()).abs().max().item() <= limit
    assert model[0].weight.grad.dtype is torch.float32
    assert not torch.equal(model(x), expected)


def test_layer_that_is_sharded_already_is_refused(mesh):
    linear = nn.Linear(6, 4)
    fully_shard(linear, mesh=mesh)
    with pytest.raises(UnsupportedError, match="apply the policy before fully_shard"):
        put(linear, "mixed_bfloat16")


def test_distributed_data_parallel_training_on_top_works(mesh):
    model = put_on_all(Net(), "mixed_bfloat16")
    parallel = nn.parallel.DistributedDataParallel(model)
    out = parallel(randn(3, 6))
    out.float().sum().backward()
    assert out.dtype is torch.bfloat16
    assert model.linear.weight.grad.dtype is torch.float32


def test_innermost_policy_wins_for_its_own_inputs_and_parameters():
    class Middle(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(4))
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            y = self.inner(x)
            return x.dtype, (x * self.gain).dtype, y.dtype

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(4))
            self.middle = Middle()

        def forward(self, x):
            return (x * self.gain).dtype, *self.middle(x)

    model = apply(Outer(), {"": "float64", "middle": "mixed_bfloat16", "middle/inner": "float32"})
    assert model(torch.ones(2, 4)) == (torch.float64, torch.bfloat16, torch.bfloat16, torch.float32)


def test_author_code_is_not_overruled_by_autocast_either():
    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.matrix = nn.Parameter(randn(4, 4))

        def forward(self, x):
            return x @ self.matrix

    module = put(Product(), "float32")
    with torch.autocast("cpu", torch.bfloat16):
        assert module(randn(2, 4)).dtype is torch.float32


SCRIPT = """
import sys, torch
folder = sys.argv[1]
for name in ("linear", "attention", "recurrent", "norm"):
    module, inputs, expected = torch.load(f"{folder}/{name}.pt", weights_only=False)
    got = module(*inputs)
    got = got[0] if isinstance(got, tuple) else got
    assert torch.equal(got, expected), name
    assert module.dtype_policy.name == "mixed_bfloat16", name
"""


def test_saved_modules_open_in_a_new_process(tmp_path):
    x = randn(3, 2, 8)
    for name, module, inputs in (
        ("linear", nn.Linear(8, 4), (x,)),
        ("attention", nn.MultiheadAttention(8, 2), (x, x, x)),
        ("recurrent", nn.LSTM(8, 4), (x,)),
        ("norm", nn.LayerNorm(8), (x,)),
    ):
        out = put(module, "mixed_bfloat16")(*inputs)
        expected = out[0] if isinstance(out, tuple) else out
        torch.save((module, inputs, expected.detach()), tmp_path / f"{name}.pt")
    done = subprocess.run([sys.executable, "-c", SCRIPT, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
