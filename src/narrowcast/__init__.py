"""narrowcast: the precision policy for the life of a model.

One policy map decides for every layer which dtype it computes in, stores its variables in and is quantized to. It is
checked before anything moves, explained, trained with, quantized by, saved and reloaded.

Example:
    >>> import torch, narrowcast
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    >>> plan = narrowcast.plan(model, {"0": "int8", "2": "keep"})
    >>> plan["0"].given
    <QuantizedDTypePolicy "int8_from_float32">
    >>> narrowcast.apply(model, plan)(torch.ones(1, 64)).shape
    torch.Size([1, 8])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

# The package is imported before its name is taken by the verb `plan`; `from narrowcast.plan import ...` still finds it.
import narrowcast.plan  # noqa: F401
from narrowcast.frameworks import apply, dequantize, load, plan, plan_of, save, tree
from narrowcast.lazy import lazily as _lazily
from narrowcast.observe import observe

if TYPE_CHECKING:
    from narrowcast import config, dtype_policies, errors, keras, layers, mixed_precision, saving
    from narrowcast.dtype_policies import (
        AWQDTypePolicy,
        DTypePolicy,
        DTypePolicyMap,
        FloatDTypePolicy,
        GPTQDTypePolicy,
        Int4DTypePolicy,
        MXDTypePolicy,
        NVFP4DTypePolicy,
        QuantizedDTypePolicy,
        QuantizedFloat8DTypePolicy,
    )
    from narrowcast.dtype_policies.files import read as read_policy
    from narrowcast.dtype_policies.files import write as write_policy
    from narrowcast.dtype_policies.keep import KeepPolicy, keep
    from narrowcast.errors import NarrowcastError
    from narrowcast.plan.plan import Plan
    from narrowcast.plan.tree import Tree

__version__ = "0.1.0.dev0"

__all__ = [
    "AWQDTypePolicy",
    "DTypePolicy",
    "DTypePolicyMap",
    "FloatDTypePolicy",
    "GPTQDTypePolicy",
    "Int4DTypePolicy",
    "KeepPolicy",
    "MXDTypePolicy",
    "NVFP4DTypePolicy",
    "NarrowcastError",
    "Plan",
    "QuantizedDTypePolicy",
    "QuantizedFloat8DTypePolicy",
    "Tree",
    "apply",
    "config",
    "dequantize",
    "dtype_policies",
    "errors",
    "keep",
    "keras",
    "layers",
    "load",
    "mixed_precision",
    "observe",
    "plan",
    "plan_of",
    "read_policy",
    "save",
    "saving",
    "tree",
    "write_policy",
]

_HOMES = {
    "NarrowcastError": "narrowcast.errors",
    "Plan": "narrowcast.plan.plan",
    "Tree": "narrowcast.plan.tree",
    "config": "narrowcast.config",
    "dtype_policies": "narrowcast.dtype_policies",
    "errors": "narrowcast.errors",
    "keras": "narrowcast.keras",
    "layers": "narrowcast.layers",
    "mixed_precision": "narrowcast.mixed_precision",
    "saving": "narrowcast.saving",
    "read_policy": "narrowcast.dtype_policies.files:read",
    "write_policy": "narrowcast.dtype_policies.files:write",
}
__getattr__ = _lazily(
    __name__, {name: "narrowcast.dtype_policies" for name in __all__ if name not in globals()} | _HOMES
)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
