"""The check that a map which a layer was given says something of the layers that there are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from narrowcast.dtype_policies import DTypePolicyMap
from narrowcast.errors import PlanError
from narrowcast.plan.bind import idle_rules
from narrowcast.torch.carrier import TorchCarrier
from narrowcast.torch.kinds import is_layer
from narrowcast.torch.layers.carrying import is_bare
from narrowcast.torch.layers.paths import ancestors
from narrowcast.torch.shadow import speaks_of_dtypes
from narrowcast.torch.tree import tree

if TYPE_CHECKING:
    from narrowcast.torch.layers.base import Layer

__all__ = ["check_map", "note_plain_modules"]

_MAX_NAMED = 3


def check_map(layer: Layer) -> None:
    """Raises where a rule of the map that a layer was given matches nothing, or can do nothing, at it and below it.

    Called when the layer has been built. Does nothing as long as a layer below is not, since more may come to be then;
    and where the map was handed down from above, for it is checked there.

    Raises:
        PlanError: names every such rule, with the nearest paths.
    """
    policies = layer._given_policy
    if not isinstance(policies, DTypePolicyMap) or not policies.keys() or is_bare():
        return
    if any(above.__dict__.get("_given_policy") is policies for above, _ in ancestors(layer)):
        return
    if not all(below._is_settled for below in layer._flatten_layers()):
        return
    if findings := idle_rules(tree(layer), policies, TorchCarrier()):
        raise PlanError(
            f"Policy map does not fit {type(layer).__name__} at {layer.path or 'the root'!r}",
            findings=findings,
            fix="Correct the map; its paths begin at the layer that it is given to",
        )


def note_plain_modules(layer: Layer, error: RuntimeError) -> None:
    """Adds a note to an error that speaks of dtypes: which modules of PyTorch below carry no policy.

    They take none from the layer above, so they are in the dtype of their parameters, whatever flows in.
    """
    if not speaks_of_dtypes(error):
        return
    plain = [
        site.path
        for site in tree(layer)
        if site.policy is None and site.dtype is not None and not is_layer(layer.get_submodule(_dotted(site.path)))
    ]
    if plain:
        named = ", ".join(map(repr, plain[:_MAX_NAMED])) + (
            f" and {len(plain) - _MAX_NAMED} more" * (len(plain) > _MAX_NAMED)
        )
        error.add_note(
            "Modules of PyTorch take no policy from the layer they stand in, and compute in the dtype of their "
            f"parameters: below {type(layer).__name__} that is so for {named}. Give them one once the layer is built: "
            f"narrowcast.apply(layer, {{{plain[0]!r}: {layer.dtype_policy.name!r}}})"
        )


def _dotted(path: str) -> str:
    return path.replace("/", ".")
