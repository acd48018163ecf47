"""Giving layers that are built another policy: by setting `dtype_policy`, and by `quantize`. All of it or nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from narrowcast.dtype_policies import DTypePolicy, DTypePolicyMap, registry
from narrowcast.dtype_policies.pattern import Pattern
from narrowcast.errors import LayerError, NarrowcastError, PlanError, UnsupportedError, closest
from narrowcast.plan.carrier import Status
from narrowcast.plan.outcome import stands_in_the_way
from narrowcast.plan.plan import Plan
from narrowcast.torch import scheme
from narrowcast.torch.apply import apply, modules_by_path, plan
from narrowcast.torch.kinds import is_layer
from narrowcast.torch.layers import paths
from narrowcast.torch.layers.carrying import carriable, changes_back, changes_to, judge
from narrowcast.torch.tree import tree

__all__ = ["convert", "quantize"]


def convert(layer: Any, policy: DTypePolicy) -> None:
    """Gives a layer a policy or a map, and all layers below that took theirs from it.

    A layer that is not built only notes it. Variables of one that is are converted: they stay the same objects, so an
    optimizer goes on with them, in the new dtype.

    Raises:
        LayerError: a layer is quantized in another mode.
        UnsupportedError: the layer cannot carry the mode.
    """
    layers = layer._flatten_layers()
    before = {id(inner): inner._resolved_policy() for inner in layers}
    given, layer._given_policy = layer._given_policy, policy
    try:
        steps = []
        for inner in layers:
            after = inner._resolved_policy()
            present = inner._carried_policy()
            took = inner is layer or present == carriable(inner, before[id(inner)])
            if inner._is_settled and took:
                steps.append((inner, present, after))
        _check(layer, steps)
        _carry_out(steps)
    except BaseException:
        layer._given_policy = given
        raise


def _check(layer: Any, steps: list[tuple[Any, DTypePolicy | None, DTypePolicy]]) -> None:
    for inner, present, after in steps:
        mode = None if present is None else present.quantization_mode
        if mode is not None and after.quantization_mode is not None and after != present:
            raise _is_quantized(inner, present, after.name)
        if inner is layer and after.quantization_mode is not None and not inner._flatten_layers(include_self=False):
            verdict = judge(inner, after)
            if verdict.status is not Status.APPLIED:
                raise UnsupportedError(
                    f"{type(inner).__name__} at {inner.path!r} cannot carry {after.name!r}: {verdict.reason}",
                    fix="Give it the policy that the mode starts from",
                )


def _is_quantized(layer: Any, present: Any, wanted: str) -> LayerError:
    return LayerError(
        f"{type(layer).__name__} at {layer.path!r} is quantized already",
        got={"policy": present.name, "wanted": wanted},
        expected="the same policy, or one without a mode",
        fix=f"Set its policy to {present.source.name!r} first, which dequantizes it; what was rounded stays rounded",
    )


def _carry_out(steps: list[tuple[Any, DTypePolicy | None, DTypePolicy]]) -> None:
    """Takes every layer to its new policy, by way of the policy of floats where a mode comes or goes."""
    undone: list[Callable[[], None]] = []
    try:
        for inner, present, asked in steps:
            after = carriable(inner, asked)
            if after is None or after == present:
                continue
            if present is not None and present.quantization_mode is not None:
                undone.append(scheme.commit(changes_back(inner)))
            if after.source is not None and after.source != present:
                undone.append(scheme.commit(changes_to(inner, after.source)))
            undone.append(scheme.commit(changes_to(inner, after)))
    except BaseException:
        for take_back in reversed(undone):
            take_back()
        raise


def quantize(layer: Any, mode: str, filters: Any) -> Plan:
    """Carries out `Layer.quantize`."""
    registry.parse_mode(mode)
    rules: dict[str, Any] = {".*": registry.make(mode, "keep")}
    with paths.frame(layer):
        modules: dict[str, Any] = {**modules_by_path(layer)}
        below = tree(layer)
        wanted = _filter(layer, filters, modules, [path for site in below for path in site.paths])
        for inner in layer._flatten_layers():
            if not inner.built and not inner._builds_by_call():
                raise LayerError(
                    f"{type(inner).__name__} at {inner.path!r} is not built, so it cannot be quantized",
                    fix="Build it first: `build(shape)`, or one call",
                )
        for site in below:
            # What is shared or tied is quantized at all of its paths or at none.
            if not any(wanted(path) for path in site.paths):
                rules.update(dict.fromkeys(site.paths, "keep"))
                continue
            for inner in (modules[path] for path in site.paths):
                present = inner._carried_policy() if is_layer(inner) else None
                if present is None or present.source is None:
                    continue
                asked = registry.make(mode, present.source)
                if present != asked and stands_in_the_way(present, asked):
                    raise _is_quantized(inner, present, mode)
    try:
        made = plan(layer, DTypePolicyMap(None, rules))
    except PlanError as error:
        raise UnsupportedError(
            f"Nothing in {type(layer).__name__} at {layer.path!r} can be quantized in mode {mode!r}",
            got={"findings": error.findings},
            fix="Choose another mode, or other filters",
        ) from error
    apply(layer, made)
    return made


def _filter(layer: Any, filters: Any, modules: Mapping[str, Any], known: list[str]) -> Callable[[str], bool]:
    """Returns what says of a path whether it is chosen."""
    if filters is None:
        return lambda path: True
    if callable(filters):
        chosen = {id(inner): bool(filters(inner)) for inner in layer._flatten_layers()}
        return lambda path: chosen[id(_holder(path, modules))]
    given = [filters] if isinstance(filters, str) else filters
    if not isinstance(given, list | tuple) or not all(isinstance(part, str) for part in given):
        raise LayerError(
            "Filters of layers are not usable",
            got={"filters": filters},
            expected="a regular expression, several of them, or a function of a layer",
        )
    try:
        patterns = [Pattern(part) for part in given]
    except NarrowcastError as error:
        raise LayerError(f"Filter of layers is not usable: {error}", got={"filters": filters}) from error
    for part, pattern in zip(given, patterns, strict=True):
        if not any(pattern.matches(path) for path in known):
            near = closest(part, known)
            raise LayerError(
                f"Filter {part!r} matches no layer of {type(layer).__name__} at {layer.path!r}",
                expected="a regular expression for the whole path of a layer, from here",
                suggestion=near[0] if near else None,
            )
    return lambda path: any(pattern.matches(path) for pattern in patterns)


def _holder(path: str, modules: Mapping[str, Any]) -> Any:
    """The layer at a path, or the nearest above, where a module of PyTorch stands there."""
    while not is_layer(modules[path]):
        path = path.rpartition("/")[0]
    return modules[path]
