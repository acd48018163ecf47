"""`keep`: the policy of layers that stay exactly as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from narrowcast.dtype_policies import registry
from narrowcast.dtype_policies.names import Grammar
from narrowcast.dtype_policies.policy import DTypePolicy
from narrowcast.errors import PolicyError

__all__ = ["KeepPolicy", "keep"]


class KeepPolicy(DTypePolicy):
    """The policy of a layer whose parameters and arithmetic stay exactly as they are.

    Where the policies of other layers change the dtype of what flows in, a kept layer's floating inputs are cast to its
    own dtype. Which dtype that is, only the layer knows, so `compute_dtype` and `variable_dtype` are `None`. As the
    source of a quantized policy, `keep` stands for the dtype that the layer has when the policy is bound to it.

    There is one object of this class, `keep`.

    Example:
        >>> keep
        <KeepPolicy "keep">
        >>> KeepPolicy() is keep
        True
    """

    _mode_name = "keep"
    _instance: ClassVar[KeepPolicy | None] = None

    def __new__(cls) -> Self:
        """Returns the one object."""
        if cls._instance is None:
            cls._instance = super().__new__(cls)
        return cls._instance  # type: ignore[return-value]

    def __init__(self) -> None:
        self._freeze(name="keep", compute_dtype=None, variable_dtype=None)

    def get_config(self) -> dict[str, Any]:
        """Returns an empty dict: there is nothing to set."""
        return {}

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None) -> Self:
        """Returns `keep`."""
        if config:
            raise PolicyError("Policy 'keep' has no settings", got={"config": dict(config)}, expected="an empty config")
        return cls()

    def __reduce__(self) -> tuple[Any, ...]:
        return KeepPolicy, ()


keep = KeepPolicy()
"""The policy of layers that stay as they are."""

registry.register(
    registry.Mode(Grammar("keep"), KeepPolicy, summary="stays as it is", is_quantized=False, is_trainable=True)
)
registry.register_singleton(keep)
