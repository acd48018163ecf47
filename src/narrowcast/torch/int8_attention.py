"""`nn.MultiheadAttention` whose projections have 8-bit weights; what lies between them stays float."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from narrowcast.dtype_policies import DTypePolicy
from narrowcast.plan.tree import Member
from narrowcast.torch import int8_gemm
from narrowcast.torch.attention import ProjectedAttention
from narrowcast.torch.inputs import cast_floats
from narrowcast.torch.int8_linear import Int8Linear, Int8WeightLinear
from narrowcast.torch.int8_plan import describe_int8, describe_weights
from narrowcast.torch.scheme import Change, register
from narrowcast.torch.stored_weights import StoredScheme, StoredWeights, check_can_carry, weights_of

__all__ = ["AttentionScheme", "Int8Attention", "Int8WeightAttention"]


def _projection(name: str) -> property:
    def get(self: Any) -> Tensor | None:
        if f"{name}_codes" not in self._buffers:
            return None
        return self._narrowcast_dequantized(name, self._narrowcast_variable)  # type: ignore[no-any-return]

    return property(get, doc="The dequantized weight, or `None` where the module has the other form of projections.")


class Int8Attention(StoredWeights, ProjectedAttention):
    """Multi-head attention with its four projections in int8. `out_proj` is an `Int8Linear` of its own.

    Numerics:
        Each projection as `narrowcast.torch.int8_gemm.linear`, what lies between as `ProjectedAttention`.
    """

    _narrowcast_product: ClassVar[Callable[..., Tensor]] = staticmethod(int8_gemm.linear)

    in_proj_weight = _projection("in_proj_weight")
    q_proj_weight = _projection("q_proj_weight")
    k_proj_weight = _projection("k_proj_weight")
    v_proj_weight = _projection("v_proj_weight")

    def _narrowcast_projected(
        self, query: Tensor, key: Tensor, value: Tensor, inner: torch.dtype
    ) -> tuple[Tensor, ...]:
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
            return tuple(self._narrowcast_product(x, *part, inner) for x, part in zip((q, k, v), parts, strict=True))
        codes, scale = buffers["in_proj_weight_codes"], buffers["in_proj_weight_scale"]
        if key is value and query is key:
            return self._narrowcast_product(q, codes, scale, bias, inner).chunk(3, dim=-1)
        queries = self._narrowcast_product(q, codes[:width], scale[:width], biases[0], inner)
        if key is value:
            rest = None if bias is None else bias[width:]
            return queries, *self._narrowcast_product(k, codes[width:], scale[width:], rest, inner).chunk(2, dim=-1)
        return (
            queries,
            self._narrowcast_product(k, codes[width : 2 * width], scale[width : 2 * width], biases[1], inner),
            self._narrowcast_product(v, codes[2 * width :], scale[2 * width :], biases[2], inner),
        )


class Int8WeightAttention(Int8Attention):
    """Multi-head attention whose projections have 8-bit weights and float activations."""

    _narrowcast_product: ClassVar[Callable[..., Tensor]] = staticmethod(int8_gemm.linear_of_weights)


class AttentionScheme(StoredScheme):
    """Carries out modes that store weights as codes at `nn.MultiheadAttention` and its `out_proj`.

    Args:
        carrier: the class of the module.
        output: the class of its `out_proj`.
        describe: what the plan says.
    """

    def __init__(self, carrier: type[StoredWeights], output: type[StoredWeights], describe: Any) -> None:
        self._whole = carrier
        self._output = output
        self._words = describe

    def _carrier(self, base: type[nn.Module]) -> type[StoredWeights]:
        return self._whole

    def _describe(self, member: Member, policy: DTypePolicy, device: str) -> tuple[str, str, int]:
        kernel, reason, num_bytes = self._words(member, policy, device, weights_of(member))
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
        check_can_carry(module, policy)
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
