"""Plans for live Keras models, and carrying them out: Keras has its own arithmetic, here it is told which.

What Keras cannot do is said before anything is changed: it keeps the dtype of a variable once it is made, and quantizes
only some layers in some modes.
"""

from __future__ import annotations

import sys
from typing import Any

from narrowcast.dtype_policies import DTypePolicy, dtypes, keep, registry
from narrowcast.errors import ModelError
from narrowcast.keras.reading import is_keras, policy_of, walk
from narrowcast.plan.bind import bind
from narrowcast.plan.carrier import Status, Verdict
from narrowcast.plan.plan import Plan
from narrowcast.plan.tree import Member, Parameter, Site, Tree

__all__ = ["KerasCarrier", "apply", "plan", "tree"]

_KINDS = {
    "Dense": "linear",
    "EinsumDense": "linear",
    "Embedding": "embedding",
    "ReversibleEmbedding": "embedding",
    "Conv1D": "conv",
    "Conv2D": "conv",
    "Conv3D": "conv",
    "LayerNormalization": "norm",
    "RMSNormalization": "norm",
    "BatchNormalization": "norm",
    "GroupNormalization": "norm",
    "Softmax": "softmax",
}
_QUANTIZES = {
    "int8": frozenset({"Dense", "EinsumDense", "Embedding", "ReversibleEmbedding"}),
    "int4": frozenset({"Dense", "EinsumDense", "Embedding", "ReversibleEmbedding"}),
    "float8": frozenset({"Dense", "EinsumDense"}),
}
"""What Keras 3.15 quantizes without calibration: by mode, the classes."""


def tree(model: Any) -> Tree:
    """Reads a live Keras model as a tree of sites; see `narrowcast.keras.KerasLayer` for the paths.

    Raises:
        ModelError: it is no model or layer of Keras.
    """
    if not is_keras(model):
        raise ModelError("Model is not one of Keras", got={"type": type(model)}, expected="a model or layer of Keras 3")
    sites = []
    for path, layer in walk(model):
        own = [*layer._trainable_variables, *layer._non_trainable_variables]
        parameters = tuple(Parameter(str(v.name), tuple(v.shape), dtypes.standardize(v.dtype)) for v in own)
        kind = _KINDS.get(type(layer).__name__, "other" if own or not layer._layers else "container")
        details = (("built", True),) if layer.built else ()
        class_name = f"{type(layer).__module__}.{type(layer).__qualname__}"
        sites.append(Site((Member((path,), kind, class_name, parameters, policy_of(layer), details),)))
    return Tree(tuple(sites), "keras", type(model).__name__)


class KerasCarrier:
    """What Keras can do at a layer; see `narrowcast.plan.carrier.Carrier`."""

    def judge(self, site: Site, policy: DTypePolicy) -> Verdict:
        """Says whether Keras carries a policy out at a layer, as it is now."""
        member = site.members[0]
        class_name = member.class_name.rpartition(".")[2]
        mode = policy.quantization_mode
        present = member.policy
        num_bytes = site.num_bytes
        if mode is not None:
            if class_name not in _QUANTIZES.get(mode, ()):
                known = mode in _QUANTIZES
                reason = f"Keras has no {mode} for {class_name}" if known else f"Keras is not told {mode} from here"
                return Verdict(Status.NOT_A_TARGET, reason=reason, bytes_after=num_bytes)
            if not member.detail("built"):
                return Verdict(
                    Status.NOT_A_TARGET, reason="not built, so Keras cannot quantize it", bytes_after=num_bytes
                )
            if policy.source != present:
                named = present.name if present is not None else "nothing"
                return Verdict(
                    Status.NOT_A_TARGET,
                    reason=f"Keras quantizes a layer from the policy it has, {named}",
                    bytes_after=num_bytes,
                )
        elif member.detail("built") and any(
            dtypes.get(p.dtype).is_floating and p.dtype != policy.variable_dtype for p in site.parameters
        ):
            reason = f"Keras keeps variables in the dtype they were made in, {site.dtype}"
            return Verdict(Status.NOT_A_TARGET, reason=reason, bytes_after=num_bytes)
        return Verdict(Status.APPLIED, bytes_after=num_bytes, kernel="Keras' own")

    def kernel(self, site: Site) -> str:
        """Says what runs at a layer now."""
        return "Keras' own" if site.parameters else ""


def plan(model: Any, policy: Any, *, strict: bool = True, fallback: Any = "source") -> Plan:
    """Says what a policy or a map will do to a live Keras model. Arguments and errors: as `narrowcast.plan`."""
    return bind(tree(model), policy, KerasCarrier(), strict=strict, fallback=fallback)


def apply(model: Any, policy: Any, *, strict: bool = True, fallback: Any = "source") -> Any:
    """Gives the layers of a live Keras model the policies of a map, and returns the model.

    Layers that are not built make their variables under the new policy. Built ones compute under it; where a policy
    would need another dtype of variables, the plan says that Keras cannot do that.

    Args:
        model: a model or layer of Keras.
        policy: a plan made for it, or whatever `narrowcast.plan` takes.
        strict: see `narrowcast.plan`.
        fallback: see `narrowcast.plan`.

    Raises:
        PlanError: what the map asks does not hold; nothing is changed.
    """
    chosen = policy if isinstance(policy, Plan) else plan(model, policy, strict=strict, fallback=fallback)
    layers = dict(walk(model))
    for row in chosen:
        layer = layers[row.path]
        if row.given is keep or row.given == row.site.policy:
            continue
        if row.given.quantization_mode is None:
            layer.dtype_policy = row.given.name
        else:
            _quantize(layer, row.given)
    return model


def _quantize(layer: Any, policy: DTypePolicy) -> None:
    keras = sys.modules["keras"]
    mode = registry.mode_of(policy).name
    settings = policy.get_config()
    block_size = settings["mode"].partition("/")[2]
    if block_size:
        layer.quantize(mode, config=keras.quantizers.Int4QuantizationConfig(block_size=int(block_size)))
    elif "amax_history_length" in settings:
        # Keras takes the length from the policy that a layer has when its state is made.
        layer.dtype_policy = keras.dtype_policies.QuantizedFloat8DTypePolicy(
            mode, settings["source_name"], settings["amax_history_length"]
        )
    else:
        layer.quantize(mode)
