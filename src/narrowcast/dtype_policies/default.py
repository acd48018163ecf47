"""The global policy: one default for the whole process, and overrides for a block of code.

Shown to users as `narrowcast.config`.
"""

from __future__ import annotations

from contextvars import ContextVar
from types import TracebackType
from typing import Any

from narrowcast.dtype_policies import registry
from narrowcast.dtype_policies.policy import DTypePolicy
from narrowcast.errors import PolicyError

__all__ = ["dtype_policy", "policy_scope", "set_dtype_policy"]

_default = DTypePolicy("float32")
_scopes: ContextVar[tuple[DTypePolicy, ...]] = ContextVar("narrowcast_policy_scopes", default=())


def dtype_policy() -> DTypePolicy:
    """Returns the global policy: that of the innermost `policy_scope`, else the default of the process.

    Reading it changes nothing.

    Example:
        >>> dtype_policy()
        <DTypePolicy "float32">
    """
    scopes = _scopes.get()
    return scopes[-1] if scopes else _default


def set_dtype_policy(policy: Any) -> None:
    """Sets the default of the process, which every thread sees. It is `float32` until it is set.

    Inside a `policy_scope` the scope's policy stays in force until the scope ends.

    Args:
        policy: what `get` takes, except `None`: a policy, its name, a dtype, a config. Not a map and not `keep`.

    Raises:
        PolicyError: there is no such policy, or it cannot be a default.

    Example:
        >>> set_dtype_policy("mixed_bfloat16")
        >>> dtype_policy()
        <DTypePolicy "mixed_bfloat16">
        >>> set_dtype_policy("float32")
    """
    global _default
    _default = _usable(policy)


class policy_scope:  # noqa: N801 - used like a function
    """Makes `policy` the global policy for a block of code; the former one is back afterwards, also on an error.

    Only the thread (or asyncio task) that enters it sees it; threads started inside do not. Scopes nest, and one scope
    can be entered again while it is in force.

    Args:
        policy: as in `set_dtype_policy`.

    Example:
        >>> with policy_scope("mixed_float16"):
        ...     dtype_policy()
        <DTypePolicy "mixed_float16">
        >>> dtype_policy()
        <DTypePolicy "float32">
    """

    def __init__(self, policy: Any) -> None:
        self._policy = _usable(policy)

    def __enter__(self) -> DTypePolicy:
        _scopes.set((*_scopes.get(), self._policy))
        return self._policy

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _scopes.set(_scopes.get()[:-1])


def _usable(policy: Any) -> DTypePolicy:
    if policy is None:
        raise PolicyError("Global policy is not given", got={"policy": None}, expected="a policy, its name, or a dtype")
    found = registry.get(policy)
    # A map, and `keep` with what starts from it, have an answer only for a given layer.
    if found._is_map or found.compute_dtype is None:
        raise PolicyError(
            "Policy cannot be global",
            got={"policy": policy},
            expected="a float policy, or a quantized policy whose source is one",
            fix="Give a map to `plan` or `apply`, or to a layer's dtype",
        )
    return found
