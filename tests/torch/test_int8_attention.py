"""Multi-head attention on 8-bit projections against PyTorch's own on the dequantized weights."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from narrowcast.numerics import relative_error
from tests.torch.int8_cases import quantized, randn

FORMS = {
    "plain": {},
    "no bias": {"bias": False},
    "batch first": {"batch_first": True},
    "learned key and value": {"add_bias_kv": True},
    "zero position": {"add_zero_attn": True},
    "everything": {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
    "other widths": {"kdim": 6, "vdim": 10},
    "other widths, batch first, no bias": {"kdim": 6, "vdim": 10, "batch_first": True, "bias": False},
}


def dequantized(module):
    """PyTorch's module with the weights that the quantized one stands for."""
    plain = nn.MultiheadAttention(
        module.embed_dim,
        module.num_heads,
        dropout=module.dropout,
        bias=module.in_proj_bias is not None,
        add_bias_kv=module.bias_k is not None,
        add_zero_attn=module.add_zero_attn,
        kdim=module.kdim,
        vdim=module.vdim,
        batch_first=module.batch_first,
    )
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            owner, _, leaf = name.rpartition(".")
            parameter.copy_(getattr(module.get_submodule(owner), leaf))
    return plain.train(module.training)


def attention(form, mode="int8/weight", **options):
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, **FORMS[form], **options)
    for name, parameter in module.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    return quantized(module, f"{mode}_from_float32").eval()


def inputs(module, kind, num_target=4, num_source=5, num_batch=3):
    widths = (module.embed_dim, module.kdim, module.vdim)
    shapes = [(num_target, widths[0]), (num_source, widths[1]), (num_source, widths[2])]
    if kind != "unbatched":
        shapes = [(num_batch, n, e) if module.batch_first else (n, num_batch, e) for n, e in shapes]
    query, key, value = (randn(*shape, seed=i) for i, shape in enumerate(shapes))
    if module._qkv_same_embed_dim:
        if kind == "self":
            query = key = value
        elif kind == "one source":
            value = key
    return query, key, value


def assert_same(actual, expected, **tolerance):
    for a, e in zip(actual, expected, strict=True):
        assert (a is None) == (e is None)
        if a is not None:
            assert a.shape == e.shape
            torch.testing.assert_close(a, e, **tolerance)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["self", "one source", "three sources", "unbatched"])
@pytest.mark.parametrize("need_weights, average", [(False, True), (True, True), (True, False)])
def test_weight_only_attention_is_pytorchs_on_the_dequantized_weights(form, kind, need_weights, average):
    module = attention(form)
    given = inputs(module, kind)
    options = {"need_weights": need_weights, "average_attn_weights": average}
    # Sums of up to 10 products in another order.
    assert_same(module(*given, **options), dequantized(module)(*given, **options), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["plain", "batch first", "everything", "other widths"])
@pytest.mark.parametrize("kind", ["self", "three sources", "unbatched"])
def test_int8_attention_is_close_to_pytorchs_on_the_dequantized_weights(form, kind):
    module = attention(form, "int8")
    given = inputs(module, kind)
    actual, weights = module(*given)
    expected, expected_weights = dequantized(module)(*given)
    # Two layers of activations of 8 bits: each is off by 1 part in 254 of the largest of a row, with 8 in a row.
    assert relative_error(actual, expected) < 0.02
    assert relative_error(weights, expected_weights) < 0.02


def masks(num_target, num_source, num_batch, num_heads):
    keep = torch.rand(num_target, num_source, generator=torch.Generator().manual_seed(7)) < 0.6
    keep[:, 0] = True  # no row that is masked as a whole
    padding = torch.zeros(num_batch, num_source, dtype=torch.bool)
    padding[1, -1] = padding[2, -2:] = True
    per_head = (~keep).expand(num_batch * num_heads, -1, -1)
    floats = randn(num_target, num_source, seed=9)
    return {
        "attn": [None, ~keep, floats, per_head, floats.expand(num_batch * num_heads, -1, -1)],
        "padding": [None, padding, torch.where(padding, -torch.inf, 0.0)],
    }


@pytest.mark.parametrize("form", ["plain", "everything"])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask and attn_mask:UserWarning")
def test_masks_mean_what_they_mean_in_pytorch(form, need_weights, batched):
    module = attention(form)
    plain = dequantized(module)
    given = inputs(module, "three sources" if batched else "unbatched")
    all_masks = masks(4, 5, 3 if batched else 1, module.num_heads) if batched else None
    if not batched:
        all_masks = {
            key: [m if m is None or m.dim() == 2 else m[:2] for m in value] for key, value in masks(4, 5, 3, 2).items()
        }
        all_masks["padding"] = [m if m is None else m[1] for m in all_masks["padding"]]
    for attn_mask, padding in itertools.product(all_masks["attn"], all_masks["padding"]):
        options = {"attn_mask": attn_mask, "key_padding_mask": padding, "need_weights": need_weights}
        assert_same(module(*given, **options), plain(*given, **options), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("with_padding", [False, True])
def test_the_hint_of_causality_means_what_it_means_in_pytorch(need_weights, with_padding):
    module = attention("plain")
    query = inputs(module, "self")[0]
    mask = nn.Transformer.generate_square_subsequent_mask(len(query))
    padding = torch.zeros(3, len(query)) if with_padding else None
    options = {"attn_mask": mask, "is_causal": True, "need_weights": need_weights, "key_padding_mask": padding}
    expected = dequantized(module)(query, query, query, **options)
    assert_same(module(query, query, query, **options), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "bad",
    [
        lambda m, q: m(q[0, 0], q, q),
        lambda m, q: m(q, q, q, key_padding_mask=torch.zeros(3, len(q), dtype=torch.long)),
        lambda m, q: m(q, q, q, attn_mask=torch.zeros(2, 2, 2, 2)),
    ],
)
def test_what_pytorch_refuses_is_refused_in_its_words(bad):
    module = attention("plain")
    query = inputs(module, "self")[0]
    with pytest.raises(Exception) as expected:
        bad(dequantized(module), query)
    with pytest.raises(type(expected.value)) as info:
        bad(module, query)
    assert str(info.value) == str(expected.value)


def test_a_hint_of_causality_without_a_mask_is_refused_as_in_pytorch():
    module = attention("plain")
    query = inputs(module, "self")[0]
    for each in (module, dequantized(module)):
        with pytest.raises(RuntimeError, match="attn_mask"):
            each(query, query, query, is_causal=True)


def test_dropout_acts_in_training_and_only_then():
    module = attention("plain", dropout=0.5)
    query = inputs(module, "self", num_target=16, num_source=16)[0]
    assert torch.equal(module(query, query, query)[0], module(query, query, query)[0])
    module.train()
    torch.manual_seed(0)
    _, weights = module(query, query, query, average_attn_weights=False)
    # 3 * 2 * 16 * 16 weights, each kept with probability one half: 5 standard deviations.
    assert abs((weights == 0).float().mean() - 0.5) < 5 * 0.5 / (3 * 2 * 16 * 16) ** 0.5
    torch.manual_seed(0)
    one = module(query, query, query, need_weights=False)[0]
    torch.manual_seed(1)
    assert not torch.equal(one, module(query, query, query, need_weights=False)[0])


@pytest.mark.parametrize("mode", ["int8", "int8/weight"])
def test_gradients_reach_inputs_and_biases(mode):
    module = attention("everything", mode)
    plain = dequantized(module)
    given = [x.requires_grad_() for x in inputs(module, "three sources")]
    twins = [x.detach().clone().requires_grad_() for x in given]
    module(*given)[0].square().sum().backward()
    plain(*twins)[0].square().sum().backward()
    tolerance = 1e-4 if mode == "int8/weight" else 0.05
    for ours, theirs in zip(given, twins, strict=True):
        assert relative_error(ours.grad, theirs.grad) < tolerance
    gradients = {name: p.grad for name, p in module.named_parameters()}
    assert set(gradients) == {"in_proj_bias", "bias_k", "bias_v", "out_proj.bias"}
    for name, grad in gradients.items():
        assert relative_error(grad, plain.get_parameter(name).grad) < tolerance


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("mode", ["int8", "int8/weight"])
def test_results_are_in_the_compute_dtype(mode, dtype):
    torch.manual_seed(0)
    module = quantized(nn.MultiheadAttention(8, 2), f"{mode}_from_mixed_{dtype}")
    query = randn(4, 3, 8)
    y, weights = module(query, query, query, attn_mask=torch.full((4, 4), -1e9).triu(1))
    assert (y.dtype, weights.dtype) == (getattr(torch, dtype),) * 2
    assert torch.isfinite(y).all()
    expected = dequantized(module)(query, query, query, attn_mask=torch.full((4, 4), -1e9).triu(1))[0]
    # Some roundings to 8 bits of significand, and two of 8-bit codes.
    assert relative_error(y, expected) < 0.03


def test_weights_of_projections_read_as_none_where_the_module_has_the_other_form():
    module = attention("plain")
    assert module.q_proj_weight is None
    assert module.in_proj_weight.shape == (24, 8)
    other = attention("other widths")
    assert other.in_proj_weight is None
    assert other.k_proj_weight.shape == (8, 6)


def test_hooks_on_the_output_projection_run():
    module = attention("plain")
    seen = []
    module.out_proj.register_forward_hook(lambda *_: seen.append(1))
    query = inputs(module, "self")[0]
    module(query, query, query)
    assert seen == [1]


def test_an_encoder_layer_with_quantized_attention_keeps_its_meaning():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).train(False)
    twin = copy.deepcopy(layer)
    quantized(layer.self_attn, "int8/weight_from_float32")
    twin.self_attn = dequantized(layer.self_attn)
    x = randn(3, 5, 8).requires_grad_()  # with gradients, so that no fast path goes around it
    torch.testing.assert_close(layer(x), twin(x), rtol=1e-5, atol=1e-5)
