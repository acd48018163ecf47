"""The scheme of float policies: which class carries one out at each kind of module, and what the plan says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from narrowcast.dtype_policies import DTypePolicy, dtypes, registry
from narrowcast.errors import UnsupportedError, WeightError
from narrowcast.plan.carrier import Status, Verdict
from narrowcast.plan.tree import Member, Site
from narrowcast.torch import keep  # noqa: F401  registers `keep`, which every plan with a float policy needs
from narrowcast.torch.carried import Cast, Guarded, GuardedList, Transparent
from narrowcast.torch.conv import ConvCast, ConvTransposeCast
from narrowcast.torch.embedding import EmbeddingCast
from narrowcast.torch.gemm import ARITHMETIC, SLOW_ON_CPU, describe_gemm
from narrowcast.torch.kinds import details_of, owned_children
from narrowcast.torch.linear import LinearCast
from narrowcast.torch.norm import UpCast, UpCastLoss
from narrowcast.torch.scheme import Carried, Change, Scheme, carrying_class, original_class, register
from narrowcast.torch.shadow import CustomCast, KnownCast

__all__ = ["FloatScheme", "describe_kernel"]

_STATE = ("_dtype_policy", "_narrowcast_compute", "_narrowcast_variable", "_narrowcast_owned")


class FloatScheme(Scheme):
    """Carries float policies out at one kind of module, by exchanging its class.

    Args:
        carrier: the class that carries a policy out.
        by_forward: other classes, for modules whose forward is the given one.
        kernel: what runs, in words, from the compute dtype and the device.
        opaque: whether the module's author decides what it returns.
    """

    def __init__(
        self,
        carrier: type[Guarded],
        by_forward: Mapping[Any, type[Guarded]] | None = None,
        *,
        kernel: Callable[[str, str], str],
        opaque: bool = False,
    ) -> None:
        self._carrier = carrier
        self._by_forward = dict(by_forward or {})
        self._kernel = kernel
        self._opaque = opaque

    def judge(self, site: Site, member: Member, policy: DTypePolicy) -> Verdict:
        """Says whether a float policy can be carried out at `member`. See `Scheme.judge`."""
        refusal = _refusal(member, policy)
        num_bytes = sum(parameter.num_bytes for parameter in member.parameters)
        if refusal:
            return Verdict(Status.NOT_A_TARGET, reason=refusal, bytes_after=num_bytes)
        return Verdict(
            Status.APPLIED,
            reason=self._reason(member, policy, site.device),
            bytes_after=sum(_bytes_after(parameter, policy) for parameter in member.parameters),
            kernel=self.describe(member, policy, site.device),
        )

    def describe(self, member: Member, policy: DTypePolicy, device: str) -> str:
        """Says in words what runs at `member` under a float policy."""
        words = self._kernel(str(policy.compute_dtype), device)
        is_mixed = policy.compute_dtype != policy.variable_dtype and member.parameters
        return f"{words}, {policy.variable_dtype} master weights" if words and is_mixed else words

    def _reason(self, member: Member, policy: DTypePolicy, device: str) -> str:
        if not self._opaque:
            return ""
        if member.class_name in _TRANSPARENT_NAMES:
            return "its layers cast for themselves"
        reason = "opaque: returns what its own forward returns"
        slow = ARITHMETIC[str(policy.compute_dtype)] in SLOW_ON_CPU and device.partition(":")[0] in ("cpu", "meta")
        return f"{reason}; this CPU has no fast {policy.compute_dtype} gemm" if slow and member.parameters else reason

    def prepare(
        self,
        module: nn.Module,
        policy: DTypePolicy,
        *,
        stored: MutableMapping[str, Tensor] | None = None,
        shared: MutableMapping[Any, Any] | None = None,
    ) -> list[Change]:
        """Builds what `module` becomes under a float policy. See `Scheme.prepare`.

        Its parameters stay the same objects and get their data in the variable dtype.

        Raises:
            UnsupportedError: the policy has no arithmetic on PyTorch, or the module cannot carry one.
        """
        compute, variable = _dtypes_of(policy)
        _check_is_carriable(module, policy)
        shared = {} if shared is None else shared
        base = original_class(module)
        owned = _cast_children(module)
        change = Change.of(module)
        change.new_class = carrying_class(self._carrier_for(base), base)
        for name in _STATE:
            change.new_dict.pop(name, None)
        change.new_dict.update(_dtype_policy=policy, _narrowcast_variable=variable)
        if issubclass(change.new_class, Cast):
            change.new_dict["_narrowcast_compute"] = compute
            if owned:
                change.new_dict["_narrowcast_owned"] = owned
        change.new_data += _converted(module, variable, shared)
        changes = [change]
        for name in owned:
            child = module._modules[name]
            if child is None or name not in owned_children(module):
                continue  # a site of its own
            guarded = Change.of(child)
            mixin = GuardedList if isinstance(child, nn.ParameterList) else Guarded
            guarded.new_class = carrying_class(mixin, original_class(child))
            guarded.new_dict["_narrowcast_variable"] = variable
            guarded.new_data += _converted(child, variable, shared)
            changes.append(guarded)
        return changes

    def _carrier_for(self, base: type[nn.Module]) -> type[Guarded]:
        # A class of layers may name its own; see `narrowcast.torch.layers`.
        own: type[Guarded] | None = getattr(base, "_narrowcast_float_carrier", None)
        found: type[Guarded] = own or self._by_forward.get(base.forward, self._carrier)
        return found

    def undo(self, module: nn.Module, *, shared: MutableMapping[Any, Any] | None = None) -> list[Change]:
        """Builds the module without its policy. Parameters stay in the variable dtype."""
        changes: list[Change] = []
        parts: list[Any] = [module, *(module._modules[name] for name in owned_children(module))]
        for part in parts:
            if isinstance(part, Guarded):
                _check_own_class(part)
                change = Change.of(cast(nn.Module, part))
                change.new_class = part._narrowcast_base
                for name in _STATE:
                    change.new_dict.pop(name, None)
                changes.append(change)
        return changes


def _dtypes_of(policy: DTypePolicy) -> tuple[torch.dtype, torch.dtype]:
    reason = _has_no_arithmetic(policy)
    if reason:
        raise UnsupportedError(
            f"Policy {policy.name!r} cannot be carried out: {reason}",
            expected=f"a policy that computes in one of {', '.join(ARITHMETIC)}",
        )
    return ARITHMETIC[str(policy.compute_dtype)], ARITHMETIC[str(policy.variable_dtype)]


def _has_no_arithmetic(policy: DTypePolicy) -> str:
    if policy.compute_dtype in ARITHMETIC and policy.variable_dtype in ARITHMETIC:
        return ""
    if policy.compute_dtype is None or dtypes.get(policy.compute_dtype).is_floating:
        return f"PyTorch has no arithmetic in {policy.compute_dtype}"
    hint = f"; the mode is {policy.compute_dtype}_from_float32" if registry.find_mode(policy.compute_dtype) else ""
    return f"{policy.compute_dtype} is not floating, and floats are never cast to what is not{hint}"


def _refusal(member: Member, policy: DTypePolicy) -> str:
    reason = _has_no_arithmetic(policy) or member.detail("refuses", "")
    if reason:
        return str(reason)
    if member.detail("parametrized") and member.policy != policy:
        return "parametrized already: apply the policy first, then parametrize"
    return ""


def _check_is_carriable(module: nn.Module, policy: DTypePolicy) -> None:
    facts = details_of(module)
    if facts.get("refuses"):
        raise UnsupportedError(
            f"{type(module).__name__} cannot carry a policy: {facts['refuses']}", got={"policy": policy}
        )
    if isinstance(module, Carried):
        _check_own_class(module)
    elif facts.get("parametrized"):
        # Removing a parametrization takes away the class above the one that it was registered on, which would be ours.
        raise UnsupportedError(
            f"{type(module).__name__} cannot carry a policy: it is parametrized already",
            got={"policy": policy},
            fix="Apply the policy first, then parametrize",
        )


def _check_own_class(module: Carried) -> None:
    own: type = carrying_class(module._narrowcast_mixin, module._narrowcast_base)
    if type(module) is not own:
        raise UnsupportedError(
            f"{own.__name__} cannot get another policy: its class was changed after it got this one",
            got={"class": type(module)},
            expected="the class that narrowcast gave it",
            fix="Undo what changed it first (`parametrize.remove_parametrizations`), or change the policy before it",
        )


def _cast_children(module: nn.Module) -> tuple[str, ...]:
    """The children whose parameters the forward of `module` reads: those of its site; `out_proj` of any attention."""
    names = [name for name in owned_children(module) if name != "parametrizations"]
    if isinstance(module, nn.MultiheadAttention) and "out_proj" not in names:
        names.append("out_proj")
    return tuple(names)


def _converted(
    module: nn.Module, variable: torch.dtype, shared: MutableMapping[Any, Any]
) -> list[tuple[nn.Parameter, Tensor]]:
    """The floating parameters that are not in the variable dtype, with their data in it; tied storage stays tied.

    Raises:
        WeightError: a value is larger than the variable dtype's largest, and would become infinity.
    """
    converted = []
    own_dtypes = getattr(module, "_narrowcast_own_dtypes", ())
    for name, parameter in module._parameters.items():
        if parameter is None or not parameter.is_floating_point() or parameter.dtype is variable or name in own_dtypes:
            continue
        data = parameter.data
        key = (data.untyped_storage()._cdata, data.storage_offset(), data.shape, data.stride(), variable)
        if key not in shared:
            # The old data stands beside the new one so that its address is not given to another tensor meanwhile.
            shared[key] = _without_overflow(name, data, variable), data
        converted.append((parameter, shared[key][0]))
    return converted


def _without_overflow(name: str, data: Tensor, variable: torch.dtype) -> Tensor:
    narrow = data.to(variable)
    if not data.is_meta and torch.finfo(variable).max < torch.finfo(data.dtype).max:
        lost = narrow.isinf() & data.isfinite()
        if bool(lost.any()):
            raise WeightError(
                f"parameter {name!r} holds values that {dtypes.standardize(variable)} cannot",
                got={"largest": float(data[lost].abs().max())},
                expected=f"at most {torch.finfo(variable).max:g}",
                fix="Choose a policy that stores variables in float32, such as 'mixed_float16', or keep the layer",
            )
    return narrow


def _bytes_after(parameter: Any, policy: DTypePolicy) -> int:
    if not dtypes.get(parameter.dtype).is_floating:
        return int(parameter.num_bytes)
    return int(parameter.num_elements) * dtypes.get(str(policy.variable_dtype)).bits // 8


def describe_kernel(member: Member, dtype: str, device: str = "cpu") -> str:
    """Says in words what runs at a module now.

    Args:
        member: the module. One that carries a float policy runs what its policy says.
        dtype: the dtype of its parameters, by name.
        device: the device of its parameters.

    Returns:
        `''` where nothing of note runs.

    Example:
        >>> describe_kernel(Member(("head",), "linear", "torch.nn.modules.linear.Linear"), "float32")
        'float32 gemm'
    """
    found = _BY_KIND.get(member.kind)
    if found is None:
        return ""
    policy = member.policy
    if policy is not None and policy.compute_dtype in ARITHMETIC and policy.quantization_mode is None:
        return found.describe(member, policy, device)
    return _NATIVE.get(member.kind, _native_gemm)(dtype, device)


def _native_gemm(dtype: str, device: str) -> str:
    return describe_gemm(dtype, device, widens=False)


def _widening_gemm(dtype: str, device: str) -> str:
    return describe_gemm(dtype, device, widens=True)


def _convolution(dtype: str, device: str) -> str:
    return describe_gemm(dtype, device, widens=True).replace("gemm", "convolution")


def _gather(dtype: str, device: str) -> str:
    return f"rows gathered, cast to {dtype}"


def _wide(dtype: str, device: str) -> str:
    return "float64" if dtype == "float64" else "float32" if dtype == "float32" else f"float32 inside, {dtype} out"


def _wide_loss(dtype: str, device: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def _own_code(dtype: str, device: str) -> str:
    return f"its own code in {dtype}"


def _nothing(dtype: str, device: str) -> str:
    return ""


_NATIVE: dict[str, Callable[[str, str], str]] = {
    "conv": lambda dtype, device: _native_gemm(dtype, device).replace("gemm", "convolution"),
    "embedding": lambda dtype, device: f"rows gathered in {dtype}",
    "norm": lambda dtype, device: dtype,
    "softmax": lambda dtype, device: dtype,
    "loss": lambda dtype, device: dtype,
    "container": _nothing,
    "other": _own_code,
    "experts": _own_code,
}

_TRANSPARENT: tuple[type[nn.Module], ...] = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_TRANSPARENT_NAMES = frozenset(f"{cls.__module__}.{cls.__qualname__}" for cls in _TRANSPARENT)
_CONVOLUTIONS = {cls.forward: ConvCast for cls in (nn.Conv1d, nn.Conv2d, nn.Conv3d)}
_TRANSPOSED = {cls.forward: ConvTransposeCast for cls in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)}

_BY_KIND = {
    "linear": FloatScheme(KnownCast, {nn.Linear.forward: LinearCast}, kernel=_widening_gemm),
    "embedding": FloatScheme(EmbeddingCast, kernel=_gather),
    "conv": FloatScheme(KnownCast, {**_CONVOLUTIONS, **_TRANSPOSED}, kernel=_convolution),
    "norm": FloatScheme(UpCast, kernel=_wide),
    "softmax": FloatScheme(UpCast, kernel=_wide),
    "loss": FloatScheme(UpCastLoss, kernel=_wide_loss),
    "attention": FloatScheme(KnownCast, kernel=_widening_gemm),
    "recurrent": FloatScheme(KnownCast, kernel=_widening_gemm),
    "experts": FloatScheme(CustomCast, kernel=_own_code, opaque=True),
    "other": FloatScheme(CustomCast, kernel=_own_code, opaque=True),
    "container": FloatScheme(
        CustomCast,
        {nn.Sequential.forward: Transparent, nn.Module.forward: Transparent},
        kernel=_nothing,
        opaque=True,
    ),
}
for _kind, _scheme in _BY_KIND.items():
    register("float", [_kind], _scheme)
