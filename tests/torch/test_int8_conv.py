"""Convolutions on 8-bit weights against PyTorch's own on the dequantized weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from narrowcast.numerics import int8
from tests.torch.int8_cases import quantized, randn

CASES = {
    "1d": (lambda: nn.Conv1d(6, 4, 3), (2, 6, 9)),
    "2d, grouped and strided": (lambda: nn.Conv2d(6, 4, 3, stride=2, padding=1, groups=2), (2, 6, 9, 9)),
    "2d, depthwise without bias": (lambda: nn.Conv2d(6, 6, 3, groups=6, bias=False), (2, 6, 9, 9)),
    "2d, circular padding": (lambda: nn.Conv2d(6, 4, 3, padding=1, padding_mode="circular"), (2, 6, 9, 9)),
    "2d, same padding": (lambda: nn.Conv2d(6, 4, 3, padding="same", dilation=2), (6, 9, 9)),
    "3d": (lambda: nn.Conv3d(2, 4, 2), (1, 2, 3, 4, 5)),
    "transposed 1d": (lambda: nn.ConvTranspose1d(6, 4, 3), (2, 6, 9)),
    "transposed 2d, grouped": (lambda: nn.ConvTranspose2d(6, 4, 3, stride=2, groups=2, output_padding=1), (2, 6, 5, 5)),
    "transposed 3d": (lambda: nn.ConvTranspose3d(4, 2, 2), (1, 4, 3, 3, 3)),
}


@pytest.fixture(params=CASES)
def case(request):
    torch.manual_seed(0)
    make, shape = CASES[request.param]
    return make, randn(*shape)


def with_weight(make, module):
    plain = make()
    plain.weight.data = module.weight
    if module.bias is not None:
        plain.bias.data = module.bias.detach().clone()
    return plain


@pytest.mark.parametrize("mode", ["int8", "int8/weight"])
def test_results_and_gradients_are_those_of_the_dequantized_weight(case, mode):
    make, x = case
    module = quantized(make(), f"{mode}_from_float32")
    plain = with_weight(make, module)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = module(ours), plain(theirs)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    y.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5)
    if module.bias is not None:
        torch.testing.assert_close(module.bias.grad, plain.bias.grad, rtol=1e-5, atol=1e-5)


def test_each_output_channel_has_a_scale_of_its_own(case):
    make, _ = case
    plain = make()
    original = plain.weight.detach().clone()
    module = quantized(plain)
    num_out = module.out_channels
    assert module.weight_codes.shape[0] == num_out
    assert module.weight_scale.numel() == num_out
    # Only where the scale goes by output channel does the largest code of each channel reach 127.
    assert (module.weight_codes.flatten(1).abs().amax(1) == 127).all()
    assert (module.weight - original).abs().max() <= original.abs().max() / 254 * 1.0001


def test_the_codes_of_a_transposed_convolution_stand_output_channels_first():
    """Each channel alone: one input that picks a single output channel of a group."""
    torch.manual_seed(0)
    plain = nn.ConvTranspose1d(6, 4, 3, groups=2, bias=False)
    weight = plain.weight.detach().clone()
    module = quantized(plain)
    for out in range(4):
        group, within = divmod(out, 2)
        channel = weight[3 * group : 3 * group + 3, within]  # (in / groups, kernel)
        parts = int8.encode(channel.reshape(1, -1))
        assert torch.equal(module.weight_codes[out].reshape(1, -1), parts["codes"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "mixed_bfloat16"])
def test_results_are_in_the_compute_dtype(dtype):
    torch.manual_seed(0)
    module = quantized(nn.Conv2d(6, 4, 3), f"int8_from_{dtype}")
    y = module(randn(2, 6, 9, 9))
    assert y.dtype == getattr(torch, dtype.removeprefix("mixed_"))
    expected = with_weight(lambda: nn.Conv2d(6, 4, 3), quantized_twin(module))(randn(2, 6, 9, 9))
    torch.testing.assert_close(y.float(), expected, rtol=0.02, atol=0.02)


def quantized_twin(module):
    twin = quantized(nn.Conv2d(6, 4, 3))
    twin.load_state_dict({k: v.float() if k == "bias" else v for k, v in module.state_dict().items()})
    return twin


def test_an_output_size_is_passed_on():
    make, shape = CASES["transposed 2d, grouped"]
    module = quantized(make())
    assert module(randn(*shape), output_size=(12, 11)).shape[-2:] == (12, 11)


def test_a_wrong_number_of_channels_gets_the_error_of_pytorch():
    module = quantized(nn.Conv2d(6, 4, 3))
    with pytest.raises(RuntimeError, match="to have 6 channels, but got 5 channels"):
        module(randn(2, 5, 9, 9))
