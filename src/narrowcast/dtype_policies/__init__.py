"""What was asked: policies, maps from layers to policies, and the global policy. Standard library only."""

# Importing the file of a mode's family registers it: one line a family.
from narrowcast.dtype_policies import awq, float8, gptq, int4, int8, mx, nvfp4  # noqa: F401
from narrowcast.dtype_policies.awq import AWQDTypePolicy
from narrowcast.dtype_policies.default import dtype_policy, policy_scope, set_dtype_policy
from narrowcast.dtype_policies.float8 import QuantizedFloat8DTypePolicy
from narrowcast.dtype_policies.gptq import GPTQDTypePolicy
from narrowcast.dtype_policies.int4 import Int4DTypePolicy
from narrowcast.dtype_policies.keep import KeepPolicy, keep
from narrowcast.dtype_policies.map import DTypePolicyMap, Match
from narrowcast.dtype_policies.mx import MXDTypePolicy
from narrowcast.dtype_policies.nvfp4 import NVFP4DTypePolicy
from narrowcast.dtype_policies.policy import DTypePolicy, FloatDTypePolicy
from narrowcast.dtype_policies.quantized import QuantizedDTypePolicy
from narrowcast.dtype_policies.registry import asked, deserialize, get, serialize

__all__ = [
    "AWQDTypePolicy",
    "DTypePolicy",
    "DTypePolicyMap",
    "FloatDTypePolicy",
    "GPTQDTypePolicy",
    "Int4DTypePolicy",
    "KeepPolicy",
    "MXDTypePolicy",
    "Match",
    "NVFP4DTypePolicy",
    "QuantizedDTypePolicy",
    "QuantizedFloat8DTypePolicy",
    "asked",
    "deserialize",
    "dtype_policy",
    "get",
    "keep",
    "policy_scope",
    "serialize",
    "set_dtype_policy",
]
