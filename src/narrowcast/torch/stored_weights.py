"""Modules that hold weights as codes: how one becomes such a module, and float again.

A parameter of floats gives way to its stored form in two buffers, `<name>_codes` and `<name>_scale`, output channels
first. The attribute of the parameter's name stays readable: it is the dequantized weight.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, MutableMapping
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from narrowcast.dtype_policies import DTypePolicy, dtypes, registry
from narrowcast.errors import CheckpointError, UnsupportedError, WeightError
from narrowcast.numerics import stored_form
from narrowcast.plan.carrier import Status, Verdict
from narrowcast.plan.tree import Member, Parameter, Site
from narrowcast.torch import kernels
from narrowcast.torch.carried import Cast
from narrowcast.torch.gemm import ARITHMETIC
from narrowcast.torch.kinds import details_of, float_shapes
from narrowcast.torch.scheme import Change, Scheme, carrying_class, original_class

__all__ = ["StoredScheme", "StoredWeights", "check_can_carry", "dequantize", "weights_of"]

_STATE = ("_dtype_policy", "_narrowcast_compute", "_narrowcast_variable", "_narrowcast_owned", "_narrowcast_frozen")
_MOVED = "_narrowcast_moved"
_VIEWED = "_narrowcast_viewed"
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `codes * scale` rounded to `dtype`; shapes as in the stored form."""
    return (codes.float() * scale).to(dtype)


class StoredWeights(Cast):
    """The base of classes that hold weights in the stored form of their mode: codes and scales.

    `_narrowcast_frozen` names the weights that did not require gradients as floats.
    """

    @staticmethod
    def _narrowcast_to_rows(module: Any, weight: Tensor) -> Tensor:
        """Brings a weight of `module` into the axis order of the stored form, output channels first."""
        return weight

    @staticmethod
    def _narrowcast_from_rows(module: Any, weight: Tensor) -> Tensor:
        """The inverse of `_narrowcast_to_rows`."""
        return weight

    def _narrowcast_dequantized(self, name: str, dtype: torch.dtype) -> Tensor:
        """The weight called `name`, in its own axis order."""
        buffers = self._buffers  # type: ignore[attr-defined]
        return self._narrowcast_from_rows(self, dequantize(buffers[f"{name}_codes"], buffers[f"{name}_scale"], dtype))

    @property
    def weight(self) -> Tensor:
        """The dequantized weight, in the variable dtype; a new tensor each time. Writing into it changes nothing."""
        return self._narrowcast_dequantized("weight", self._narrowcast_variable)

    def _narrowcast_narrow(self, name: str) -> Any:
        if name == "weight":
            return self._narrowcast_dequantized(name, self._narrowcast_compute)
        return super()._narrowcast_narrow(name)

    def _narrowcast_bias(self) -> Tensor | None:
        try:
            return self._parameters["bias"]  # type: ignore[attr-defined,no-any-return]
        except KeyError:  # parametrized: a property of the class above ours
            return self.bias  # type: ignore[attr-defined, no-any-return]

    def extra_repr(self) -> str:
        """The class's own, and the policy."""
        own = super().extra_repr()  # type: ignore[misc]
        return f"{own}, policy={self._dtype_policy.name}" if own else f"policy={self._dtype_policy.name}"

    def __getstate__(self) -> dict[str, Any]:
        # Plain pickle cannot read float8 tensors back (PyTorch 2.13; `torch.save` can), so they travel as bytes.
        state: dict[str, Any] = dict(super().__getstate__())  # type: ignore[call-overload]
        viewed = {name: b.dtype for name, b in state["_buffers"].items() if b is not None and b.dtype in _FLOAT8}
        if viewed:
            as_bytes = {name: state["_buffers"][name].view(torch.uint8) for name in viewed}
            state |= {"_buffers": {**state["_buffers"], **as_bytes}, _VIEWED: viewed}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        viewed = state.pop(_VIEWED, {})
        as_floats = {name: state["_buffers"][name].view(dtype) for name, dtype in viewed.items()}
        super().__setstate__({**state, "_buffers": {**state["_buffers"], **as_floats}})  # type: ignore[misc]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        for buffer in self._buffers.values():  # type: ignore[attr-defined]
            if buffer is not None:
                # A tensor made in inference mode counts no writes, so its layouts cannot tell that they are old.
                kernels.drop_layouts(buffer)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = dict(self._buffers)  # type: ignore[attr-defined]
        super()._apply(fn, recurse)
        for name, old in before.items():
            if old is not None:
                self._buffers[name] = _tied(old, self._buffers[name])  # type: ignore[attr-defined]
        return self


def _tied(old: Tensor, new: Tensor) -> Tensor:
    """`new`, or what a module that shared `old` got for it before: moving parts shared buffers, unlike parameters."""
    if new is old:
        return new
    memory = old.untyped_storage().__dict__.setdefault(_MOVED, {})
    key = (old.storage_offset(), old.shape, new.device, new.dtype)
    moved = memory[key]() if key in memory else None
    if moved is None:
        memory[key] = ref(new.untyped_storage())
        return new
    return torch.empty(0, dtype=new.dtype, device=new.device).set_(moved, 0, new.shape, new.stride())


class StoredScheme(Scheme):
    """Quantizes the weights of one kind of module. What runs on them is up to the class that `_carrier` chooses."""

    @abstractmethod
    def _carrier(self, base: type[nn.Module]) -> type[StoredWeights]:
        """Returns the class that carries the policy out at modules of class `base`."""

    @abstractmethod
    def _describe(self, member: Member, policy: DTypePolicy, device: str) -> tuple[str, str, int]:
        """Returns what will run, in words; what to know before; and the bytes of kernels' layouts."""

    def _refusal(self, member: Member) -> str:
        """Why this one module cannot have the mode although its kind has it; `''` if nothing stands in the way."""
        for parameter in weights_of(member):
            if parameter.num_elements == 0:
                return f"its {parameter.name} is empty, shape {parameter.shape}"
        return ""

    def _rows(self, member: Member, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a weight's codes from that of the weight."""
        return shape

    def judge(self, site: Site, member: Member, policy: DTypePolicy) -> Verdict:
        """Says whether `policy` can be carried out at `member`. See `Scheme.judge`."""
        num_bytes = sum(parameter.num_bytes for parameter in member.parameters)
        reason = _no_arithmetic(policy) or str(member.detail("refuses", ""))
        if reason:
            return Verdict(Status.NOT_A_TARGET, reason=reason, bytes_after=num_bytes)
        reason = self._refusal(member)
        if reason:
            return Verdict(Status.FELL_BACK, reason=reason, bytes_after=num_bytes)
        kernel, reason, bytes_kernel = self._describe(member, policy, site.device)
        weights = weights_of(member)
        bits = dtypes.get(str(policy.variable_dtype)).bits
        rest = sum(p.num_elements * bits // 8 for p in member.parameters if p not in weights)
        return Verdict(
            Status.APPLIED,
            reason=reason,
            bytes_after=rest + sum(_form_of(policy).num_bytes(self._rows(member, p.shape)) for p in weights),
            bytes_kernel=bytes_kernel,
            kernel=kernel,
        )

    def prepare(
        self,
        module: nn.Module,
        policy: DTypePolicy,
        *,
        stored: MutableMapping[str, Tensor] | None = None,
        shared: MutableMapping[Any, Any] | None = None,
    ) -> list[Change]:
        """Builds what `module` becomes under `policy`. See `Scheme.prepare`."""
        check_can_carry(module, policy)
        shared = {} if shared is None else shared
        return [self._quantized(module, self._carrier(original_class(module)), policy, stored, shared)]

    def _quantized(
        self,
        module: nn.Module,
        carrier: type[StoredWeights],
        policy: DTypePolicy,
        stored: MutableMapping[str, Tensor] | None,
        shared: MutableMapping[Any, Any],
        prefix: str = "",
    ) -> Change:
        """The change of one module: its own weights quantized, its other parameters in the variable dtype."""
        change = Change.of(module)
        change.new_class = carrying_class(carrier, original_class(module))
        for name in _STATE:
            change.new_dict.pop(name, None)
        variable = ARITHMETIC[str(policy.variable_dtype)]
        change.new_dict.update(
            _dtype_policy=policy,
            _narrowcast_compute=ARITHMETIC[str(policy.compute_dtype)],
            _narrowcast_variable=variable,
        )
        parameters, frozen = change.new_dict["_parameters"], []
        for name in [name for name in float_shapes(module) if parameters.get(name) is not None]:
            parameter = parameters.pop(name)
            if not parameter.requires_grad:
                frozen.append(name)
            encoded = _encoded(module, parameter, carrier, policy, prefix + name, stored, shared)
            for part, tensor in encoded.items():
                change.new_dict["_buffers"][f"{name}_{part}"] = tensor
        if frozen:
            change.new_dict["_narrowcast_frozen"] = tuple(frozen)
        for parameter in parameters.values():
            if parameter is not None and parameter.is_floating_point() and parameter.dtype is not variable:
                change.new_data.append((parameter, parameter.data.to(variable)))
        self._finish(change, module, None if stored is None else (stored, prefix))
        return change

    def _finish(
        self, change: Change, module: nn.Module, loaded: tuple[MutableMapping[str, Tensor], str] | None
    ) -> None:
        """Gives the change of a module what a mode has beside codes and scales.

        Args:
            change: what the module becomes.
            module: the module as it is.
            loaded: the tensors of a file, and what stands before the names of this module's; `None` where it is the
                module's own values that are quantized.
        """

    def undo(self, module: nn.Module, *, shared: MutableMapping[Any, Any] | None = None) -> list[Change]:
        """Builds the module of floats: its own class, and the dequantized weights in the variable dtype."""
        return [self._floats(module, {} if shared is None else shared)]

    def _floats(self, module: Any, shared: MutableMapping[Any, Any]) -> Change:
        carrier, variable = module._narrowcast_mixin, module._narrowcast_variable
        if type(module) is not carrying_class(carrier, original_class(module)):
            raise UnsupportedError(
                f"{original_class(module).__name__} cannot be dequantized: its class was changed since",
                got={"class": type(module)},
                fix="Undo what changed it first (`parametrize.remove_parametrizations`)",
            )
        change = Change.of(module)
        change.new_class = original_class(module)
        buffers, weights = change.new_dict["_buffers"], {}
        frozen = change.new_dict.get("_narrowcast_frozen", ())
        for name in [name for name in float_shapes(module) if f"{name}_codes" in buffers]:
            codes, scale = buffers.pop(f"{name}_codes"), buffers.pop(f"{name}_scale")
            key = ("codes to floats", codes.untyped_storage()._cdata, codes.storage_offset())
            if key not in shared:
                data = carrier._narrowcast_from_rows(module, dequantize(codes, scale, variable))
                shared[key] = nn.Parameter(data.contiguous(), requires_grad=name not in frozen)
            weights[name] = shared[key]
        change.new_dict["_parameters"] = {**weights, **change.new_dict["_parameters"]}
        for name in _STATE:
            change.new_dict.pop(name, None)
        return change


def _form_of(policy: DTypePolicy) -> stored_form.StoredForm:
    return stored_form.of(registry.mode_of(policy).name)


def _encoded(
    module: nn.Module,
    parameter: Tensor,
    carrier: type[StoredWeights],
    policy: DTypePolicy,
    name: str,
    stored: MutableMapping[str, Tensor] | None,
    shared: MutableMapping[Any, Any],
) -> dict[str, Tensor]:
    """The tensors that stand for a parameter: quantized, or taken from a file; the same objects where it is tied."""
    form = _form_of(policy)
    rows = carrier._narrowcast_to_rows(module, parameter.detach())
    key = ("codes", rows.untyped_storage()._cdata, rows.storage_offset(), rows.shape, rows.stride())
    if stored is not None:
        loaded = {part: stored.pop(f"{name}_{part}", None) for part in form.parts(tuple(rows.shape))}
        if key not in shared:
            shared[key] = {part: _checked(tensor, form, name, part, rows) for part, tensor in loaded.items()}
    elif key not in shared:
        with torch.inference_mode(False), torch.no_grad():
            try:
                parts = form.encode(rows)
            except WeightError as error:
                problem = error.problem.replace("Weight", f"Parameter {name!r}", 1)
                raise WeightError(problem, got=error.got, expected=error.expected, fix=error.fix) from None
            shared[key] = {part: tensor.contiguous() for part, tensor in parts.items()}
    found: dict[str, Tensor] = shared[key]
    return found


def _checked(tensor: Tensor | None, form: stored_form.StoredForm, name: str, part: str, rows: Tensor) -> Tensor:
    shape, dtype = form.parts(tuple(rows.shape))[part]
    if tensor is None:
        raise CheckpointError(f"Tensor {name}_{part} is missing", expected=f"{dtype}, shape {shape}")
    if tuple(tensor.shape) != shape or tensor.dtype is not getattr(torch, dtype):
        raise CheckpointError(
            f"Tensor {name}_{part} is not the one that the layer needs",
            got={"shape": tuple(tensor.shape), "dtype": dtypes.standardize(tensor.dtype)},
            expected=f"{dtype}, shape {shape}",
        )
    return tensor if rows.is_meta else tensor.to(rows.device)


def weights_of(member: Member) -> list[Parameter]:
    """Returns the parameters of a site that are quantized: weights by name, not biases."""
    return [parameter for parameter in member.parameters if parameter.name.endswith("weight")]


def _no_arithmetic(policy: DTypePolicy) -> str:
    for name in (policy.compute_dtype, policy.variable_dtype):
        if name not in ARITHMETIC:
            return f"PyTorch has no arithmetic in {name}"
    return ""


def check_can_carry(module: nn.Module, policy: DTypePolicy) -> None:
    """Refuses a module that cannot hold its weights as codes.

    Raises:
        UnsupportedError: it has none of its own, is one that no policy fits, or the policy has no arithmetic.
    """
    reason = _no_arithmetic(policy) or details_of(module).get("refuses", "")
    if not reason and not any(module._parameters.get(name) is not None for name in float_shapes(module)):
        reason = "it has no weight of its own to quantize"
    if reason:
        raise UnsupportedError(
            f"{original_class(module).__name__} cannot carry {registry.mode_of(policy).name}: {reason}",
            got={"policy": policy},
        )
