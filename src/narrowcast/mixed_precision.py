"""The global policy under the names of Keras 2; `narrowcast.config` has the same under the present ones.

Example:
    >>> from narrowcast import mixed_precision
    >>> mixed_precision.Policy("mixed_bfloat16")
    <DTypePolicy "mixed_bfloat16">
"""

from __future__ import annotations

from narrowcast.dtype_policies import DTypePolicy, dtype_policy, set_dtype_policy

__all__ = ["DTypePolicy", "Policy", "dtype_policy", "global_policy", "set_dtype_policy", "set_global_policy"]

Policy = DTypePolicy
global_policy = dtype_policy
set_global_policy = set_dtype_policy
