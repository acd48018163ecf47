"""The global policy: a default for the whole process, and overrides for a block of code.

Example:
    >>> from narrowcast import config
    >>> config.set_dtype_policy("mixed_float16")
    >>> config.dtype_policy()
    <DTypePolicy "mixed_float16">
    >>> config.set_dtype_policy("float32")
"""

from __future__ import annotations

from narrowcast.dtype_policies import DTypePolicy, dtype_policy, policy_scope, set_dtype_policy

__all__ = ["DTypePolicy", "dtype_policy", "policy_scope", "set_dtype_policy"]
