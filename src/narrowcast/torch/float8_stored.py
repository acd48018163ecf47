"""float8 for inference: layers whose weights are stored as float8, and how one comes from a layer that trained in it.

`float8/static` takes the scales that delayed scaling had at the end of training, for inputs and weights alike, so it
computes what the trained layer computes in eval mode. `float8/dynamic` and `float8/weight` need no training.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from narrowcast.dtype_policies import DTypePolicy
from narrowcast.errors import CheckpointError, WeightError
from narrowcast.numerics import float8
from narrowcast.plan.carrier import Status, Verdict
from narrowcast.plan.tree import Member, Parameter, Site
from narrowcast.torch import float8_inference
from narrowcast.torch.float8_gemm import MULTIPLE, has_float8_gemm, learn_devices
from narrowcast.torch.float8_scheme import drop_training_state, emulation, has_delayed_scaling
from narrowcast.torch.float8_state import ROLES, SCALE
from narrowcast.torch.gemm import describe_gemm
from narrowcast.torch.int8_attention import AttentionScheme, Int8Attention
from narrowcast.torch.int8_linear import InputsFirst, LinearScheme
from narrowcast.torch.scheme import Change, register
from narrowcast.torch.stored_weights import StoredScheme, StoredWeights

__all__ = ["DynamicAttention", "DynamicLinear", "StaticAttention", "StaticLinear", "WeightAttention", "WeightLinear"]

INPUT_SCALE = "float8_input_scale"
"""What the input of each product is multiplied by before it is rounded, float32, shape `(products,)`; a buffer."""


class DynamicLinear(StoredWeights):
    """A linear layer on float8 weights; each row of its input is rounded to float8 by its own largest magnitude."""

    _narrowcast_product: ClassVar[Callable[..., Tensor]] = staticmethod(float8_inference.dynamic)

    def _narrowcast_run(self, input: Tensor) -> Any:
        buffers = self._buffers  # type: ignore[attr-defined]
        bias, compute = self._narrowcast_bias(), self._narrowcast_compute
        return self._narrowcast_product(input, buffers["weight_codes"], buffers["weight_scale"], bias, compute)


class WeightLinear(DynamicLinear):
    """A linear layer on float8 weights; its input is cast to the compute dtype."""

    _narrowcast_product: ClassVar[Callable[..., Tensor]] = staticmethod(float8_inference.of_weights)


class StaticLinear(StoredWeights):
    """A linear layer on float8 weights; its input is rounded to float8 by the scale that it had after training."""

    def _narrowcast_run(self, input: Tensor) -> Any:
        buffers = self._buffers  # type: ignore[attr-defined]
        return float8_inference.static(
            input,
            buffers["weight_codes"],
            buffers["weight_scale"],
            self._narrowcast_bias(),
            self._narrowcast_compute,
            buffers[INPUT_SCALE][0],
        )


class DynamicConv1D(InputsFirst, DynamicLinear):
    """`DynamicLinear` for `Conv1D`."""


class WeightConv1D(InputsFirst, WeightLinear):
    """`WeightLinear` for `Conv1D`."""


class StaticConv1D(InputsFirst, StaticLinear):
    """`StaticLinear` for `Conv1D`."""


class DynamicAttention(Int8Attention):
    """Multi-head attention with its projections on float8 weights, as `DynamicLinear`."""

    _narrowcast_product: ClassVar[Callable[..., Tensor]] = staticmethod(float8_inference.dynamic)


class WeightAttention(Int8Attention):
    """Multi-head attention with its projections on float8 weights, as `WeightLinear`."""

    _narrowcast_product: ClassVar[Callable[..., Tensor]] = staticmethod(float8_inference.of_weights)


class StaticAttention(Int8Attention):
    """Multi-head attention with its projections on float8 weights, as `StaticLinear`; one scale for each product."""

    def _narrowcast_projected(
        self, query: Tensor, key: Tensor, value: Tensor, inner: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Queries, keys and values; those that come from one tensor by one product."""
        module: Any = self
        buffers, width = module._buffers, module.embed_dim
        bias = module.in_proj_bias
        biases = (None,) * 3 if bias is None else bias.chunk(3)

        def product(number: int, x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
            return float8_inference.static(x, codes, scale, bias, inner, buffers[INPUT_SCALE][number])

        if "in_proj_weight_codes" not in buffers:
            return tuple(
                product(i, x, buffers[f"{n}_proj_weight_codes"], buffers[f"{n}_proj_weight_scale"], biases[i])
                for i, (x, n) in enumerate(zip((query, key, value), "qkv", strict=True))
            )
        codes, scale = buffers["in_proj_weight_codes"], buffers["in_proj_weight_scale"]
        if key is value and query is key:
            return product(0, query, codes, scale, bias).chunk(3, dim=-1)
        queries = product(0, query, codes[:width], scale, biases[0])
        if key is value:
            rest = None if bias is None else bias[width:]
            return queries, *product(1, key, codes[width:], scale, rest).chunk(2, dim=-1)
        keys = product(1, key, codes[width : 2 * width], scale, biases[1])
        return queries, keys, product(2, value, codes[2 * width :], scale, biases[2])


class _FromTraining(StoredScheme):
    """Takes over from a module that trains in float8: its state goes."""

    def _finish(
        self, change: Change, module: nn.Module, loaded: tuple[MutableMapping[str, Tensor], str] | None
    ) -> None:
        learn_devices()
        drop_training_state(change)


class _Frozen(_FromTraining):
    """Takes over the scales as well."""

    def judge(self, site: Site, member: Member, policy: DTypePolicy) -> Verdict:
        """Says whether `member` has trained with delayed scaling, whose scales are what this mode needs."""
        verdict = super().judge(site, member, policy)
        if member.policy == policy or has_delayed_scaling(member.policy, member.kind):
            return verdict
        num_bytes = sum(parameter.num_bytes for parameter in member.parameters)
        reason = "takes its scales from training in the mode float8, which this layer has not had"
        return Verdict(Status.NOT_A_TARGET, reason=reason, bytes_after=num_bytes)

    def _finish(
        self, change: Change, module: nn.Module, loaded: tuple[MutableMapping[str, Tensor], str] | None
    ) -> None:
        super()._finish(change, module, loaded)
        buffers = change.new_dict["_buffers"]
        if loaded is not None:
            stored, prefix = loaded
            scale = stored.pop(prefix + INPUT_SCALE, None)
            if scale is None or scale.dim() != 1:
                raise CheckpointError(f"Tensor {prefix}{INPUT_SCALE} is missing", expected="float32, one axis")
            device = next(buffer.device for name, buffer in buffers.items() if name.endswith("_codes"))
            buffers[INPUT_SCALE] = scale.float().to(device)
            return
        trained = module._buffers.get(SCALE)
        scales = torch.zeros(1, len(ROLES)) if trained is None else trained.view(-1, len(ROLES))
        if not bool((scales[0, :2] > 0).all()):
            raise WeightError(
                "its scales are not known, since its state has not moved on with a training step",
                fix="Train it in the mode float8 first, with `narrowcast.torch.advance` after each step of an optimizer"
                " that is not PyTorch's; give averaged weights the state of the model that was trained; or use "
                "float8/dynamic, which needs none",
            )
        # A product that was never made in training is rounded as the first one.
        inputs = torch.where(scales[:, 0] > 0, scales[:, 0], scales[0, 0])
        buffers[INPUT_SCALE] = inputs.clone()
        carrier = cast(type[StoredWeights], change.new_class)
        names = [name.removesuffix("_codes") for name in buffers if name.endswith("_codes")]
        for number, name in enumerate(names):
            weight_scale = scales[number, 1] if len(names) > 1 else _common(scales[:, 1])
            if weight_scale > 0:
                weight = cast(nn.Parameter, module._parameters[name])
                rows = carrier._narrowcast_to_rows(module, weight.detach())
                buffers[f"{name}_codes"] = float8.quantize(rows, weight_scale).contiguous()
                buffers[f"{name}_scale"] = weight_scale.reciprocal().reshape(1, 1)

    def _floats(self, module: Any, shared: MutableMapping[Any, Any]) -> Change:
        change = super()._floats(module, shared)
        change.new_dict["_buffers"].pop(INPUT_SCALE, None)
        return change


def _common(scales: Tensor) -> Tensor:
    """The scale of a weight that one product used as a whole; 0 where several used parts of it."""
    return scales[0] if int((scales > 0).sum()) == 1 else scales.new_zeros(())


class FrozenLinear(_Frozen, LinearScheme):
    """Carries out `float8/static` at linear layers."""


class FrozenAttention(_Frozen, AttentionScheme):
    """Carries out `float8/static` at attention."""


class StoredLinear(_FromTraining, LinearScheme):
    """Carries out `float8/dynamic` and `float8/weight` at linear layers."""


class StoredAttention(_FromTraining, AttentionScheme):
    """Carries out `float8/dynamic` and `float8/weight` at attention."""


def _describe_products(
    member: Member, policy: DTypePolicy, device: str, weights: list[Parameter], *, by_row: bool
) -> tuple[str, str, int]:
    how = "each row of activations rounded as it comes" if by_row else "activations rounded by frozen scales"
    fits = all(length % MULTIPLE == 0 for weight in weights for length in weight.shape)
    if has_float8_gemm(device) and fits and (policy.compute_dtype == "bfloat16" or not by_row):
        return f"float8 gemm, {how}", "", 0
    words = f"float8 values, {emulation(str(policy.compute_dtype), device)}, {how}"
    return words, "smaller, not faster: float8 is emulated", 0


def _describe_static(
    member: Member, policy: DTypePolicy, device: str, weights: list[Parameter]
) -> tuple[str, str, int]:
    return _describe_products(member, policy, device, weights, by_row=False)


def _describe_dynamic(
    member: Member, policy: DTypePolicy, device: str, weights: list[Parameter]
) -> tuple[str, str, int]:
    return _describe_products(member, policy, device, weights, by_row=True)


def _describe_weight(
    member: Member, policy: DTypePolicy, device: str, weights: list[Parameter]
) -> tuple[str, str, int]:
    words = describe_gemm(str(policy.compute_dtype), device, widens=True)
    return f"{words}, on weights made floats at each call", "smaller, not faster", 0


register("float8/static", ["linear"], FrozenLinear(StaticLinear, StaticConv1D, _describe_static))
register("float8/dynamic", ["linear"], StoredLinear(DynamicLinear, DynamicConv1D, _describe_dynamic))
register("float8/weight", ["linear"], StoredLinear(WeightLinear, WeightConv1D, _describe_weight))
register("float8/static", ["attention"], FrozenAttention(StaticAttention, StaticLinear, _describe_static))
register("float8/dynamic", ["attention"], StoredAttention(DynamicAttention, DynamicLinear, _describe_dynamic))
register("float8/weight", ["attention"], StoredAttention(WeightAttention, WeightLinear, _describe_weight))
