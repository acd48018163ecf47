"""How a module comes to multiply in float8 while it trains, and what plans say of it.

The parameters are those of the float policy that the float8 one starts from: the same objects, in the variable dtype,
with gradients and optimizer states in it. Inputs and weights are rounded to float8 from the dtype they have, in
float32; the output has the compute dtype. `narrowcast.torch.float8_product` has the recipes,
`narrowcast.torch.float8_state` what delayed scaling remembers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from narrowcast.dtype_policies import DTypePolicy, QuantizedFloat8DTypePolicy
from narrowcast.errors import CheckpointError
from narrowcast.plan.carrier import Status, Verdict
from narrowcast.plan.tree import Member, Site
from narrowcast.torch import float8_clock
from narrowcast.torch.carried import Cast, drift
from narrowcast.torch.casting import FloatScheme
from narrowcast.torch.float8_gemm import MULTIPLE, has_float8_gemm, learn_devices
from narrowcast.torch.float8_product import block, by_row, by_tensor
from narrowcast.torch.float8_state import (
    HISTORY,
    INDEX,
    PENDING,
    ROLES,
    SCALE,
    fit,
    layout_problem,
    new_state,
)
from narrowcast.torch.gemm import ARITHMETIC, SLOW_ON_CPU
from narrowcast.torch.scheme import Change, carrying_class, find, original_class
from narrowcast.torch.straight_through import is_left_to_torch

__all__ = [
    "Float8Layer",
    "Float8Scheme",
    "blockwise",
    "current",
    "delayed",
    "drop_training_state",
    "emulation",
    "has_delayed_scaling",
    "rowwise",
]

Recipe = Callable[..., Tensor]
"""Multiplies for one module: `recipe(module, product, x, weight, bias, dtype)`, all with two axes."""


def delayed(module: Any, product: int, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Scales by the state of the module's product of this number, and records the amaxes while it trains."""
    if module.training and not torch.compiler.is_compiling():
        float8_clock.note_forward()
    roles = slice(product * len(ROLES), (product + 1) * len(ROLES))
    return by_tensor(
        x,
        weight,
        bias,
        dtype,
        stored=module.float8_scale[roles],
        pending=module.float8_pending_amax[roles] if module._narrowcast_is_recording() else None,
        margin=module._float8_margin,
        wide_gradient=module._float8_wide_gradient,
    )


def current(module: Any, product: int, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Scales each tensor by its own amax."""
    return by_tensor(x, weight, bias, dtype, wide_gradient=module._float8_wide_gradient)


def rowwise(module: Any, product: int, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Scales each row of what is multiplied by its own amax."""
    return by_row(x, weight, bias, dtype, wide_gradient=module._float8_wide_gradient)


def blockwise(module: Any, product: int, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Scales each block by its own amax."""
    return block(x, weight, bias, dtype, wide_gradient=module._float8_wide_gradient)


class Float8Layer(Cast):
    """The base of layers that multiply in float8.

    `_float8_recipe` is one of the recipes above; `_float8_wide_gradient` whether the weight's gradient is multiplied in
    the compute dtype.
    """

    _float8_recipe: Recipe
    _float8_wide_gradient: bool

    def _narrowcast_multiply(
        self, product: int, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Returns `x @ weight.T + bias`, `x` of any number of axes, in `dtype` (the compute dtype where not given)."""
        dtype = self._narrowcast_compute if dtype is None else dtype
        if is_left_to_torch(x, weight):
            # The state stays as it is.
            x = x.to(dtype) if x.is_floating_point() else x
            return F.linear(x, weight.to(dtype), None if bias is None else bias.to(dtype))
        y = self._float8_recipe(self, product, x.reshape(-1, x.shape[-1]), weight, bias, dtype)
        return y.view(*x.shape[:-1], weight.shape[0])

    def _narrowcast_master(self, name: str) -> Any:
        """The module's parameter called `name` as it is stored; it is rounded to float8 from there."""
        parameter = getattr(self, name)
        if parameter.dtype is not self._narrowcast_variable and parameter.dtype is not self._narrowcast_compute:
            raise drift(self, name, parameter.dtype)
        return parameter

    def extra_repr(self) -> str:
        """The class's own, and the policy."""
        own = super().extra_repr()  # type: ignore[misc]
        return f"{own}, policy={self._dtype_policy.name}" if own else f"policy={self._dtype_policy.name}"


_OWN = ("_float8_recipe", "_float8_wide_gradient", "_float8_margin", "_float8_use_max", "_float8_manual", PENDING)
_BUFFERS = (SCALE, HISTORY, INDEX)
FEW_WEIGHTS = 2**22
"""Below so many weights a float8 GEMM is usually slower than a bfloat16 one, by torchao's measurements on an H100."""


class Float8Scheme(FloatScheme):
    """Carries out a training mode of float8 at one kind of module.

    Args:
        recipe: how the module's products are multiplied.
        carrier: the class that carries it.
        by_forward: other classes, for modules whose forward is the given one.
        output: the class of the module's `out_proj`, where it owns one.
        num_products: how many products the module multiplies itself.
        has_state: whether the recipe scales by what it saw in former steps.
        by_row: whether there is one scale for each row; such float8 GEMMs give bfloat16 only.
        has_gemm: whether there are float8 GEMMs for this recipe.
    """

    def __init__(
        self,
        recipe: Recipe,
        carrier: type[Float8Layer],
        by_forward: Mapping[Any, type[Float8Layer]] | None = None,
        *,
        output: type[Float8Layer] | None = None,
        num_products: int = 1,
        has_state: bool = False,
        by_row: bool = False,
        has_gemm: bool = True,
    ) -> None:
        super().__init__(carrier, by_forward, kernel=lambda dtype, device: f"{dtype} gemm")
        self._recipe = recipe
        self._output = output
        self._num_products = num_products
        self.has_state = has_state
        self._by_row = by_row
        self._has_gemm = has_gemm

    def judge(self, site: Site, member: Member, policy: DTypePolicy) -> Verdict:
        """Says whether float8 can be carried out at `member`, and whether it is real or emulated there."""
        verdict = super().judge(site, member, policy)
        if verdict.status is not Status.APPLIED:
            return verdict
        kernel, reason = self._kernel_of(member, policy, site.device)
        num_bytes = 0
        if self.has_state:
            state = new_state(
                self._num_products + (self._output is not None), _history_length(policy), torch.device("meta")
            )
            num_bytes = sum(tensor.nbytes for tensor in state.values())
        return replace(verdict, kernel=kernel, reason=reason, bytes_after=verdict.bytes_after + num_bytes)

    def _kernel_of(self, member: Member, policy: DTypePolicy, device: str) -> tuple[str, str]:
        """What runs, in words, and what to know before."""
        compute = str(policy.compute_dtype)
        emulated = f"float8 values, {emulation(compute, device) if self._has_gemm else 'float32 gemm'}"
        if not has_float8_gemm(device):
            return emulated, "emulated: slower than without float8, which this device has no gemm for"
        shapes = [p.shape for p in member.parameters if p.name.endswith("weight") and len(p.shape) == 2]
        if not self._has_gemm:
            return emulated, "emulated: slower than without float8, which PyTorch has no gemm of this kind for"
        if self._by_row and compute != "bfloat16":
            return emulated, f"emulated: float8 gemms by row give bfloat16, and this layer computes in {compute}"
        if compute == "float64":
            return emulated, "emulated: float8 gemms give float32 at most, and this layer computes in float64"
        if any(length % MULTIPLE for shape in shapes for length in shape):
            return emulated, f"emulated: a float8 gemm takes multiples of {MULTIPLE}, and this layer is {shapes[0]}"
        slow = min(shape[0] * shape[1] for shape in shapes) < FEW_WEIGHTS
        return "float8 gemm", f"may be slower than {compute}: fewer than {FEW_WEIGHTS:,} weights" if slow else ""

    def prepare(
        self,
        module: nn.Module,
        policy: DTypePolicy,
        *,
        stored: MutableMapping[str, Tensor] | None = None,
        shared: MutableMapping[Any, Any] | None = None,
    ) -> list[Change]:
        """Builds what `module` becomes. See `Scheme.prepare`. Parameters stay the same objects, in the variable dtype.

        A module that trains in float8 already keeps its state, cut or filled up to the new length of history.
        """
        learn_devices()
        settings: Any = policy  # of this mode's own class
        changes = super().prepare(module, policy, stored=stored, shared=shared)
        for change in changes:
            is_own = change.module is module
            prefix = "" if is_own else "out_proj."
            if not is_own and self._output is not None:
                change.new_class = carrying_class(self._output, original_class(change.module))
                change.new_dict.update(
                    _dtype_policy=policy, _narrowcast_compute=changes[0].new_dict["_narrowcast_compute"]
                )
            settings = cast(QuantizedFloat8DTypePolicy, policy)
            state = None
            if self.has_state:
                state = _state_for(change.module, policy, self._num_products if is_own else 1, stored, prefix)
            drop_training_state(change)
            change.new_dict.update(
                _float8_recipe=self._recipe,
                _float8_wide_gradient=settings.high_precision_weight_gradient,
            )
            if state is not None:
                change.new_dict.update(
                    _float8_margin=settings.margin, _float8_use_max=settings.amax_compute_algo == "max"
                )
                change.new_dict[PENDING] = state[PENDING]
                change.new_dict["_buffers"].update({name: state[name] for name in _BUFFERS})
                float8_clock.register(change.module)
        return changes

    def undo(self, module: nn.Module, *, shared: MutableMapping[Any, Any] | None = None) -> list[Change]:
        """Builds the module without its policy. Parameters stay in the variable dtype; the state is dropped."""
        changes = super().undo(module, shared=shared)
        for change in changes:
            drop_training_state(change)
        return changes


def emulation(compute: str, device: str) -> str:
    """Says in words what multiplies float8 values on a device without float8 GEMMs, for results in a dtype."""
    if device.partition(":")[0] == "cuda":
        return "bfloat16 gemm"
    dtype = ARITHMETIC[compute]
    return "bfloat16 gemm" if dtype is torch.bfloat16 and dtype not in SLOW_ON_CPU else "float32 gemm"


def _history_length(policy: DTypePolicy) -> int:
    length: int = policy.amax_history_length  # type: ignore[attr-defined]
    return length


def has_delayed_scaling(policy: DTypePolicy | None, kind: str) -> bool:
    """Says whether a module of a kind, under a policy, scales by what it saw in former steps."""
    found = None if policy is None else find(policy, kind)
    return isinstance(found, Float8Scheme) and found.has_state


def drop_training_state(change: Change) -> None:
    """Takes away from a change whatever training in float8 put into the module."""
    for name in _OWN:
        change.new_dict.pop(name, None)
    for name in _BUFFERS:
        change.new_dict["_buffers"].pop(name, None)


def _state_for(
    module: nn.Module,
    policy: DTypePolicy,
    num_products: int,
    stored: MutableMapping[str, Tensor] | None,
    prefix: str,
) -> dict[str, Tensor]:
    """The state that a module begins with: the one of a file, the one that it has, or a new one."""
    device = next((p.device for p in module._parameters.values() if p is not None), torch.device("cpu"))
    length = _history_length(policy)
    with torch.inference_mode(False), torch.no_grad():
        fresh = new_state(num_products, length, device)
        if stored is not None:
            found = {name: stored.pop(prefix + name) for name in fresh if prefix + name in stored}
            problem = layout_problem(found, fresh) if fresh.keys() == found.keys() else "is not complete"
            if problem:
                raise CheckpointError(f"float8 state {problem}", fix="Save the model again")
            where = torch.device("cpu") if device.type == "meta" else device
            return {name: tensor.to(where) for name, tensor in fit(found, length).items()}
        if PENDING in module.__dict__:
            present = {name: getattr(module, name) for name in fresh}
            if not layout_problem(present, fresh):
                return fit(present, length)
        return fresh
