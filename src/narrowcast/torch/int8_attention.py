"""`nn.MultiheadAttention` whose projections have 8-bit weights; what lies between them stays float.

Names of axes: b batch, h head, l target position, s source position, d width of a head, e width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from narrowcast.dtype_policies import DTypePolicy
from narrowcast.plan.tree import Member
from narrowcast.torch import int8_gemm
from narrowcast.torch.gemm import is_slow
from narrowcast.torch.inputs import cast_floats, cast_mask
from narrowcast.torch.int8_linear import Int8Linear, Int8WeightLinear
from narrowcast.torch.int8_plan import describe_int8, describe_weights
from narrowcast.torch.int8_scheme import Int8Scheme, Int8Weights, _check_can_carry, _weights
from narrowcast.torch.scheme import Change, register

__all__ = ["Int8Attention", "Int8WeightAttention"]


def _projection(name: str) -> property:
    def get(self: Any) -> Tensor | None:
        if f"{name}_codes" not in self._buffers:
            return None
        return self._dequantized(name, self._narrowcast_variable)  # type: ignore[no-any-return]

    return property(get, doc="The dequantized weight, or `None` where the module has the other form of projections.")


class Int8Attention(Int8Weights):
    """Multi-head attention with its four projections in int8. `out_proj` is an `Int8Linear` of its own.

    Numerics:
        Each projection as `narrowcast.torch.int8_gemm.linear`; scores, softmax and mixing in the compute dtype (in
        float32 where the CPU multiplies that slowly). Masks and shapes mean what they do in `nn.MultiheadAttention`.
    """

    _project: ClassVar[Callable[..., Tensor]] = staticmethod(int8_gemm.linear)

    in_proj_weight = _projection("in_proj_weight")
    q_proj_weight = _projection("q_proj_weight")
    k_proj_weight = _projection("k_proj_weight")
    v_proj_weight = _projection("v_proj_weight")

    def _narrowcast_run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> Any:
        module: Any = self
        compute = self._narrowcast_compute
        inner = torch.float32 if is_slow(query, compute) else compute
        is_batched = F._mha_shape_check(query, key, value, key_padding_mask, attn_mask, module.num_heads)  # type: ignore[attr-defined]
        key_padding_mask, attn_mask = _additive(key_padding_mask, attn_mask, compute, inner)
        if is_causal and attn_mask is None:
            # RuntimeError, as in PyTorch.
            raise RuntimeError("Attention got is_causal=True without attn_mask. It is a hint about a mask: give both.")
        q, k, v = self._projected(query, key, value, inner)
        batch_first = is_batched and module.batch_first
        if not is_batched:
            q, k, v = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        q, k, v = (self._heads(x, batch_first=batch_first) for x in (q, k, v))
        if is_causal and key_padding_mask is None and not need_weights:
            attn_mask = None
        else:
            is_causal = False
        k, v, num_extra = self._with_extra_positions(k, v)
        mask = _merged(attn_mask, key_padding_mask, q.shape[0], module.num_heads, num_extra)
        dropout = module.dropout if module.training else 0.0
        weights = None
        if need_weights:
            weights = _scores(q, k, mask)
            if dropout > 0.0:
                weights = F.dropout(weights, p=dropout)
            mixed = weights @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
        # (b, h, l, d) to (l, b, e) or (b, l, e)
        mixed = mixed.permute((0, 2, 1, 3) if batch_first else (2, 0, 1, 3)).flatten(2)
        y = module.out_proj(mixed.to(compute))
        if weights is not None:
            weights = (weights.mean(1) if average_attn_weights else weights).to(compute)
        if not is_batched:
            y, weights = y.squeeze(1), None if weights is None else weights.squeeze(0)
        return y, weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor, inner: torch.dtype) -> tuple[Tensor, ...]:
        """Queries, keys and values; those that come from one tensor by one product."""
        compute = self._narrowcast_compute
        buffers, width = self._buffers, self.embed_dim  # type: ignore[attr-defined]
        bias = self.in_proj_bias  # type: ignore[attr-defined]
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        q, k, v = (cast_floats(x, compute) for x in (query, key, value))
        if "in_proj_weight_codes" not in buffers:
            parts = [
                (buffers[f"{n}_proj_weight_codes"], buffers[f"{n}_proj_weight_scale"], b)
                for n, b in zip("qkv", biases, strict=True)
            ]
            return tuple(self._project(x, *part, inner) for x, part in zip((q, k, v), parts, strict=True))
        codes, scale = buffers["in_proj_weight_codes"], buffers["in_proj_weight_scale"]
        if key is value and query is key:
            return self._project(q, codes, scale, bias, inner).chunk(3, dim=-1)
        queries = self._project(q, codes[:width], scale[:width], biases[0], inner)
        if key is value:
            rest = None if bias is None else bias[width:]
            return queries, *self._project(k, codes[width:], scale[width:], rest, inner).chunk(2, dim=-1)
        return (
            queries,
            self._project(k, codes[width : 2 * width], scale[width : 2 * width], biases[1], inner),
            self._project(v, codes[2 * width :], scale[2 * width :], biases[2], inner),
        )

    def _heads(self, x: Tensor, *, batch_first: bool) -> Tensor:
        """From (l, b, e), or (b, l, e), to (b, h, l, d)."""
        module: Any = self
        x = x.reshape(*x.shape[:-1], module.num_heads, module.head_dim)
        return x.transpose(1, 2) if batch_first else x.permute(1, 2, 0, 3)

    def _with_extra_positions(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
        """Appends the learned key and value, and a position of zeros, where the module has them."""
        module: Any = self
        num_batch, num_heads, _, width = k.shape
        num_extra = 0
        if module.bias_k is not None:
            extra = (num_batch, num_heads, 1, width)
            k = torch.cat([k, module.bias_k.to(k.dtype).view(1, num_heads, 1, width).expand(extra)], dim=2)
            v = torch.cat([v, module.bias_v.to(v.dtype).view(1, num_heads, 1, width).expand(extra)], dim=2)
            num_extra += 1
        if module.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
            num_extra += 1
        return k, v, num_extra


class Int8WeightAttention(Int8Attention):
    """Multi-head attention whose projections have 8-bit weights and float activations."""

    _project: ClassVar[Callable[..., Tensor]] = staticmethod(int8_gemm.linear_of_weights)


def _additive(
    key_padding_mask: Tensor | None, attn_mask: Tensor | None, compute: torch.dtype, inner: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Both masks as what is added to the scores; PyTorch checks them, with its own words."""
    padding = F._canonical_mask(
        mask=key_padding_mask,
        mask_name="key_padding_mask",
        other_type=F._none_or_dtype(attn_mask),
        other_name="attn_mask",
        target_type=inner,
    )
    mask = F._canonical_mask(
        mask=attn_mask,
        mask_name="attn_mask",
        other_type=None,
        other_name="",
        target_type=inner,
        check_other=False,
    )
    return cast_floats(cast_mask(padding, compute), inner), cast_floats(cast_mask(mask, compute), inner)


def _merged(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, num_batch: int, num_heads: int, num_extra: int
) -> Tensor | None:
    """One mask that broadcasts against (b, h, l, s). The extra positions are never masked."""
    if attn_mask is not None:
        attn_mask = F.pad(attn_mask, (0, num_extra))
        if attn_mask.dim() == 3:
            attn_mask = attn_mask.view(num_batch, num_heads, *attn_mask.shape[1:])
    if key_padding_mask is not None:
        key_padding_mask = F.pad(key_padding_mask, (0, num_extra))[:, None, None, :]
        return key_padding_mask if attn_mask is None else attn_mask + key_padding_mask
    return attn_mask


def _scores(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.transpose(-2, -1)
    return torch.softmax(scores if mask is None else scores + mask, dim=-1)


class AttentionScheme(Int8Scheme):
    """Carries out `int8` and `int8/weight` at `nn.MultiheadAttention` and its `out_proj`.

    Args:
        carrier: the class of the module.
        output: the class of its `out_proj`.
        describe: what the plan says.
    """

    def __init__(self, carrier: type[Int8Weights], output: type[Int8Weights], describe: Any) -> None:
        self._whole = carrier
        self._output = output
        self._words = describe

    def _carrier(self, base: type[nn.Module]) -> type[Int8Weights]:
        return self._whole

    def _describe(self, member: Member, policy: DTypePolicy, device: str) -> tuple[str, str, int]:
        kernel, reason, num_bytes = self._words(member, policy, device, _weights(member))
        return f"{kernel}; attention in {policy.compute_dtype}", reason, num_bytes

    def prepare(
        self,
        module: nn.Module,
        policy: DTypePolicy,
        *,
        stored: MutableMapping[str, Tensor] | None = None,
        shared: MutableMapping[Any, Any] | None = None,
    ) -> list[Change]:
        """Builds the attention and its `out_proj`. See `Scheme.prepare`."""
        _check_can_carry(module, policy)
        shared = {} if shared is None else shared
        output: Any = module._modules["out_proj"]
        return [
            self._quantized(module, self._whole, policy, stored, shared),
            self._quantized(output, self._output, policy, stored, shared, prefix="out_proj."),
        ]

    def undo(self, module: nn.Module, *, shared: MutableMapping[Any, Any] | None = None) -> list[Change]:
        """Builds the attention and its `out_proj` of floats."""
        shared = {} if shared is None else shared
        return [self._floats(part, shared) for part in (module, module._modules["out_proj"])]


register("int8", ["attention"], AttentionScheme(Int8Attention, Int8Linear, describe_int8))
register("int8/weight", ["attention"], AttentionScheme(Int8WeightAttention, Int8WeightLinear, describe_weights))
