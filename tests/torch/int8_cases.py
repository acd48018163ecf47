"""Putting a mode on one module through its scheme, and the bounds that int8 arithmetic keeps."""

from __future__ import annotations

import torch
from torch import nn

from narrowcast.dtype_policies import get
from narrowcast.torch import scheme
from narrowcast.torch.tree import tree


def quantized(module, policy="int8_from_float32", **options):
    """Carries `policy` out at `module`, in place, and returns it."""
    (site,) = [site for site in tree(module) if site.path == ""]
    carrier = scheme.find(get(policy), site.kind)
    scheme.commit(carrier.prepare(module, get(policy), **options))
    return module


def verdict(module, policy="int8_from_float32"):
    site = tree(module)[""]
    return scheme.find(get(policy), site.kind).judge(site, site.members[0], get(policy))


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def linear(inner, outer, bias=True, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(inner, outer, bias=bias)


def bound(x, layer, unit=2.0**-24):
    """How far `layer(x)` may be from the product with the dequantized weight, by row and channel.

    Half a step of the row's codes times the sum of magnitudes of the channel's weights; then roundings: a few of
    float32 of all that is added up, and one of the dtype that the result has.
    """
    weight = layer.weight.detach().double().abs()
    rows = x.detach().double()
    step = rows.abs().amax(-1, keepdim=True) / 127
    largest = rows.abs() @ weight.t() + step * weight.sum(1)
    if layer.bias is not None:
        largest = largest + layer.bias.detach().double().abs()
    return step / 2 * weight.sum(1) + largest * (8 * 2.0**-24 + 2 * unit)
