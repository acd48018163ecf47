"""Names of a package that are imported when they are first used, so that importing the package costs little."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["lazily"]


def lazily(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package that finds its names in modules not yet imported.

    Args:
        package: the package's `__name__`.
        homes: where each name is defined: a module; `module:name` where the name is another there; for a name that is a
            module, that module.

    Example:
        >>> find = lazily("narrowcast", {"DTypePolicy": "narrowcast.dtype_policies"})
        >>> find("DTypePolicy")("float32")
        <DTypePolicy "float32">
        >>> find("DTypePolice")
        Traceback (most recent call last):
        AttributeError: module 'narrowcast' has no attribute 'DTypePolice'
    """

    def __getattr__(name: str) -> Any:  # noqa: N807
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module_name, _, other_name = home.partition(":")
        module = importlib.import_module(module_name)
        value = module if home == f"{package}.{name}" else getattr(module, other_name or name)
        # Kept, so that this runs once for each name.
        setattr(sys.modules[package], name, value)
        return value

    return __getattr__
