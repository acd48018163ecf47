"""Which policy a layer has: its own, or that of a layer above it, looked up in a map by the layer's path.

A layer that was given a policy has it. One that was given none takes that of the nearest layer above that was given
one, and else the global policy of the moment it was made. A map is looked up by the path from the layer that it was
given to. An exact key in a map above a layer wins over what the layer itself was given: only a config names layers so
closely.
"""

from __future__ import annotations

from typing import Any

from narrowcast.dtype_policies import DTypePolicy, DTypePolicyMap, dtype_policy, keep
from narrowcast.torch.layers.paths import ancestors

__all__ = ["look_up", "resolve", "without_mode"]


def resolve(layer: Any) -> DTypePolicy:
    """Returns the policy that a layer is to have: one policy, never a map, and never starting from `keep`.

    Raises:
        OverlapError: patterns of a map give the layer's path different policies.
    """
    given: list[tuple[str, DTypePolicy]] = []
    for path, policy in _given_from(layer):
        if given and given[-1][1] is policy:
            # A map that was handed down is one object all the way: it belongs to the topmost layer that has it.
            given[-1] = path, policy
        else:
            given.append((path, policy))
    for path, policy in given:
        if isinstance(policy, DTypePolicyMap) and path in policy:
            return _settled(policy[path], policy)
    if not given:
        return _settled(layer._global_policy, layer._global_policy)
    path, policy = given[0]
    return _settled(policy[path] if isinstance(policy, DTypePolicyMap) else policy, policy)


def _given_from(layer: Any) -> list[tuple[str, DTypePolicy]]:
    """What the layer and the modules above it were given, nearest first, with the path from there to the layer."""
    found = [("", layer._given_policy)]
    found += [(path, above.__dict__.get("_given_policy")) for above, path in ancestors(layer)]
    return [(path, policy) for path, policy in found if policy is not None]


def look_up(given: DTypePolicyMap, path: str) -> DTypePolicy:
    """Returns what a map that was given to a layer says of the layer at a path from there; never `keep`."""
    return _settled(given[path], given)


def without_mode(policy: DTypePolicy) -> DTypePolicy:
    """Returns a policy as a layer without its quantization mode has it: the source of a quantized one."""
    return policy if policy.source is None else policy.source


def _settled(policy: DTypePolicy, given: DTypePolicy) -> DTypePolicy:
    """Replaces `keep` by the policy of floats around: the default of the map, else the global policy."""
    if policy is not keep and policy.source is not keep:
        return policy
    around = without_mode(given.default_policy) if isinstance(given, DTypePolicyMap) else keep
    if around is keep:
        around = without_mode(dtype_policy())
    settled: Any = policy
    return around if policy is keep else settled.with_source(around)
