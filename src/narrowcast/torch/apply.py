"""Carrying a plan out on a PyTorch model, and going back.

Everything is built first and then exchanged at once: an error or an interrupt leaves the model as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from narrowcast.dtype_policies import DTypePolicy, DTypePolicyMap, keep, registry
from narrowcast.errors import ModelError, PlanError, UnsupportedError, WeightError
from narrowcast.plan.bind import bind
from narrowcast.plan.plan import Plan, Row
from narrowcast.torch import fused, scheme
from narrowcast.torch.amp import expect_scaler
from narrowcast.torch.carrier import TorchCarrier
from narrowcast.torch.kinds import working_module
from narrowcast.torch.scheme import Change
from narrowcast.torch.tree import tree

__all__ = ["apply", "asked_of", "carries_out", "dequantize", "modules_by_path", "plan", "plan_of", "trainable_tensors"]

_PLAN = "_narrowcast_plan"


def plan(model: nn.Module, policy: Any, *, strict: bool = True, fallback: str = "source") -> Plan:
    """Binds a policy or a map to a model, touching no tensor.

    Args:
        model: any module, on any device, `meta` included.
        policy: a `DTypePolicyMap`, a policy, or a name: one policy goes to every site that can carry it.
        strict: whether findings (overlaps, rules that match or can do nothing) are errors, or warnings in the plan.
        fallback: `"source"`, or `"error"` to refuse sites that would fall back.

    Raises:
        PlanError: what the map asks does not hold; lists every finding.
        UnsupportedError: a mode has no scheme on PyTorch yet.

    Example:
        >>> import torch
        >>> print(plan(torch.nn.Sequential(torch.nn.Linear(64, 64)), "int8")["0"].given.name)
        int8_from_float32
    """
    return bind(tree(model), policy, TorchCarrier(), strict=strict, fallback=fallback)


def apply(
    model: nn.Module,
    policy: Any,
    batches: Iterable[Any] | None = None,
    *,
    strict: bool = True,
    fallback: str = "source",
) -> nn.Module:
    """Changes `model` in place to what a policy, a map or a plan says, and returns it.

    Every new tensor is built first; then classes and tensors are exchanged. Peak memory is the model plus the result.

    Args:
        model: the model. Modules keep their identity; `isinstance`, hooks and references stay valid.
        policy: a plan made for this model, or whatever `plan` takes.
        batches: inputs for modes that calibrate. No mode of this version does, so anything given is refused.
        strict: as in `plan`.
        fallback: as in `plan`.

    Raises:
        PlanError: as in `plan`, or a plan that was made for another model.
        WeightError: a weight holds NaN or infinity. The model is unchanged.

    Example:
        >>> import torch
        >>> model = apply(torch.nn.Sequential(torch.nn.Linear(64, 64)), "int8")
        >>> model[0].dtype_policy
        <QuantizedDTypePolicy "int8_from_float32">
    """
    if batches is not None:
        raise UnsupportedError(
            "No mode of this version calibrates, so batches would be ignored",
            fix="Leave `batches` out",
        )
    chosen = policy if isinstance(policy, Plan) else plan(model, policy, strict=strict, fallback=fallback)
    if chosen is policy:
        _check_made_for(chosen, model)
    with trainable_tensors():
        changes = _changes(model, chosen)
        _attach(model, chosen, changes)
        scheme.commit(changes)
    expect_scaler(model, chosen)
    return model


def dequantize(model: nn.Module) -> nn.Module:
    """Takes every quantized site of `model` back to the policy it started from, in place, and returns it.

    Weights are the dequantized ones: what quantization rounded stays rounded. Float policies stay.

    Example:
        >>> import torch
        >>> model = dequantize(apply(torch.nn.Sequential(torch.nn.Linear(64, 64)), "int8"))
        >>> type(model[0]) is torch.nn.Linear, model[0].weight.dtype
        (True, torch.float32)
    """
    with trainable_tensors():
        _dequantize(model)
    return model


def _dequantize(model: nn.Module) -> None:
    shared: dict[Any, Any] = {}
    changes: list[Change] = []
    sources: list[tuple[nn.Module, str, DTypePolicy]] = []
    for site in tree(model):
        for member in site.members:
            module = working_module(model.get_submodule(member.paths[0].replace("/", ".")))
            carried = module.__dict__.get("_dtype_policy")
            if carried is None or carried.quantization_mode is None:
                continue
            carrier = scheme.find(carried, member.kind)
            if carrier is None:  # pragma: no cover - a carried policy always has its scheme
                continue
            built = carrier.undo(module, shared=shared)
            for change in built:
                change.new_dict.pop("_asked_policy", None)
            changes += built
            asked = module.__dict__.get("_asked_policy", carried)
            if asked.source is not keep:
                sources.append((module, member.kind, carried.source))
    roll_back = scheme.commit(changes)
    try:
        again: list[Change] = []
        for module, kind, source in sources:
            carrier = scheme.find(source, kind)
            if carrier is not None:
                again += carrier.prepare(module, source)
        undo_sources = scheme.commit(again)
        try:
            carried = {module for module in model.modules() if "_dtype_policy" in module.__dict__}
            attached = fused.changes_for(model, carried)
            _attach(model, plan(model, DTypePolicyMap()), attached)
            scheme.commit(attached)
        except BaseException:
            undo_sources()
            raise
    except BaseException:
        roll_back()
        raise


@contextmanager
def trainable_tensors() -> Iterator[None]:
    """Makes tensors that can be trained with, whatever surrounds the call.

    In `torch.inference_mode` a new tensor would be one that autograd refuses for ever.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


def plan_of(model: nn.Module) -> Plan | None:
    """Returns the plan that `apply` or `load` carried out on `model`, or `None`.

    Example:
        >>> import torch
        >>> plan_of(torch.nn.Linear(2, 2)) is None
        True
    """
    return model.__dict__.get(_PLAN)


def modules_by_path(model: nn.Module) -> dict[str, nn.Module]:
    """Returns every module by its path, shared modules under each of theirs."""
    return {name.replace(".", "/"): module for name, module in model.named_modules(remove_duplicate=False)}


def carries_out(row: Row) -> DTypePolicy | None:
    """Returns the policy that the modules of a row carry after `apply`; `None` where they stay plain."""
    if row.casts_inputs:
        return keep
    return None if row.given == keep else row.given


def asked_of(row: Row, before: DTypePolicy | None = None) -> DTypePolicy:
    """Returns the policy that `dequantize` reads the source of: `keep` there means a module without a policy.

    Args:
        row: what a plan says of the module.
        before: what this returned for the policy that the module carries now, where that is known.
    """
    if row.asked is None:
        return row.given
    present = row.site.policy
    if row.asked.source is not keep or present is None or present == keep:
        return row.asked
    # `keep` stands for the float policy that the module carries, or that the mode it carries started from.
    return row.asked if before is not None and before.source is keep else row.given


def _changes(model: nn.Module, chosen: Plan) -> list[Change]:
    modules = modules_by_path(model)
    changes: list[Change] = []
    carried: set[nn.Module] = set()
    for row in chosen:
        policy = carries_out(row)
        if policy is None:
            continue
        shared: dict[Any, Any] = {}
        for member in row.site.members:
            module = working_module(modules[member.paths[0]])
            carried.add(module)
            if module.__dict__.get("_dtype_policy") == policy:
                continue
            carrier = scheme.find(policy, member.kind)
            if carrier is None:
                raise PlanError(
                    f"Plan gives {policy.name!r} to {member.paths[0]!r}, a kind of layer that cannot carry it",
                    fix="Make the plan with `narrowcast.plan`",
                )
            if policy.quantization_mode is not None and not registry.mode_of(policy).is_trainable:
                _check_has_values(module, member.paths[0])
            try:
                built = carrier.prepare(module, policy, shared=shared)
            except WeightError as error:
                raise WeightError(
                    f"Layer {member.paths[0]!r} cannot carry {policy.name!r}: {error.problem}",
                    got=error.got,
                    expected=error.expected,
                    fix=error.fix,
                ) from None
            for change in built:
                if change.module is module:
                    change.new_dict["_asked_policy"] = asked_of(row, module.__dict__.get("_asked_policy"))
            changes += built
    changes += fused.changes_for(model, carried, changes)
    return changes


def _attach(model: nn.Module, chosen: Plan, changes: list[Change]) -> None:
    """Adds to `changes` what hangs the plan on the root, where `save` and `plan_of` find it."""
    change = next((change for change in changes if change.module is model), None)
    if change is None:
        change = Change.of(model)
        changes.append(change)
    change.new_dict[_PLAN] = chosen


def _check_made_for(chosen: Plan, model: nn.Module) -> None:
    # On which device the tensors are may differ: a plan made on the meta device is a plan for the real model.
    planned, present = ([(site.members, site.tied) for site in of] for of in (chosen.tree, tree(model)))
    if planned == present:
        return
    differing = [old[0][0].paths[0] or "the root" for old, new in zip(planned, present, strict=False) if old != new]
    raise PlanError(
        "Plan was made for another model, or for this model before it changed",
        findings=[
            f"{len(planned)} sites in the plan, {len(present)} in the model",
            *([f"the first site that differs is {differing[0]!r}"] if differing else []),
        ],
        fix="Make the plan again with `narrowcast.plan(model, policy)`",
    )


def _check_has_values(module: nn.Module, path: str) -> None:
    if any(parameter.is_meta for parameter in module.parameters()):
        raise ModelError(
            f"Layer {path!r} is on the meta device and has no values to quantize",
            fix="Give the model its weights first; plans need none, and `narrowcast.load` fills a meta model",
        )
