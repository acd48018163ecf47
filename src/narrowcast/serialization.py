"""Objects as plain JSON values and back: layers, initializers, regularizers, functions, policies.

An object is written as the name of its class and what its `get_config` returns. It is made again from classes that are
known here: narrowcast's own, those registered with `register_serializable`, and those given by scope or by argument.
Nothing is imported by a name that stands in a file, and nothing of a file is run.

Shown to users as `narrowcast.saving`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import TracebackType
from typing import Any, TypeVar

from narrowcast import arrays, dtype_policies
from narrowcast.dtype_policies import DTypePolicy, dtypes
from narrowcast.errors import ConfigError, NarrowcastError, closest

__all__ = [
    "CustomObjectScope",
    "builtin",
    "deserialize",
    "get_custom_objects",
    "get_registered_name",
    "get_registered_object",
    "register_serializable",
    "serialize",
    "sharing",
]

Registered = TypeVar("Registered")

_BUILTIN: dict[str, Any] = {}
_REGISTERED: dict[str, Any] = {}
_NAMES: dict[Any, str] = {}
_scopes: ContextVar[tuple[Mapping[str, Any], ...]] = ContextVar("narrowcast_custom_objects", default=())
_shared: ContextVar[_Shared | None] = ContextVar("narrowcast_shared_objects", default=None)


def builtin(*names: str) -> Callable[[Registered], Registered]:
    """Makes a class or function of narrowcast known by its own name, and by `names`."""

    def register(obj: Registered) -> Registered:
        for name in (obj.__name__, *names):  # type: ignore[attr-defined]
            _BUILTIN[name] = obj
        return obj

    return register


def register_serializable(package: str = "Custom", name: str | None = None) -> Callable[[Registered], Registered]:
    """Registers a class or function, so that models that hold it can be saved and loaded without being given it again.

    Args:
        package: a name that keeps classes of the same name in different libraries apart.
        name: the name within the package; that of the class where it is not given.

    Returns:
        A decorator. The object is known as `<package>><name>`.

    Raises:
        ConfigError: a class has no `get_config`, or another class has this name already. The same class defined again
            (a notebook cell run twice) takes the place of its former self.

    Example:
        >>> @register_serializable("MyPackage")
        ... def twice(x):
        ...     return 2 * x
        >>> get_registered_name(twice)
        'MyPackage>twice'
        >>> get_registered_object("MyPackage>twice") is twice
        True
    """
    if not isinstance(package, str):
        raise ConfigError(
            "Package is not text",
            got={"package": package},
            expected="the name of a package",
            fix="Write `@register_serializable()` or `@register_serializable('MyPackage')`, with the parentheses",
        )

    def register(obj: Registered) -> Registered:
        if isinstance(obj, type) and not hasattr(obj, "get_config"):
            raise ConfigError(
                f"Class {obj.__name__} has no `get_config` method, so it cannot be made again from a config",
                fix="Give it one that returns the arguments of its `__init__`",
            )
        registered = f"{package}>{name or obj.__name__}"  # type: ignore[attr-defined]
        former = _REGISTERED.get(registered)
        if former is not None and former is not obj and _origin(former) != _origin(obj):
            raise ConfigError(
                f"Name {registered!r} is registered already",
                got={"registered": former, "new": obj},
                expected="one class for each name",
                fix="Register one of them under another package or name",
            )
        _REGISTERED[registered] = obj
        _NAMES[obj] = registered
        return obj

    return register


def _origin(obj: Any) -> tuple[str, str]:
    return obj.__module__, obj.__qualname__


class CustomObjectScope:
    """Makes objects known by name for a block of code; scopes nest, the inner one first.

    Only the thread (or asyncio task) that enters it sees it.

    Args:
        custom_objects: classes and functions by name.

    Example:
        >>> class Plain: ...
        >>> with CustomObjectScope({"Plain": Plain}):
        ...     get_registered_object("Plain") is Plain
        True
        >>> get_registered_object("Plain") is None
        True
    """

    def __init__(self, custom_objects: Mapping[str, Any] | None) -> None:
        self._objects = dict(custom_objects or {})

    def __enter__(self) -> CustomObjectScope:
        _scopes.set((*_scopes.get(), self._objects))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _scopes.set(_scopes.get()[:-1])


def get_custom_objects() -> dict[str, Any]:
    """Returns the table of registered objects by name itself, not a copy: what is put in is registered."""
    return _REGISTERED


def get_registered_name(obj: Any) -> str:
    """Returns the name that a class or function is registered under; its own name where it is not."""
    try:
        registered = _NAMES.get(obj)
    except TypeError:  # a callable that has no hash
        registered = None
    return str(obj.__name__) if registered is None else registered


def get_registered_object(
    name: str, custom_objects: Mapping[str, Any] | None = None, module_objects: Mapping[str, Any] | None = None
) -> Any:
    """Returns the class or function called `name`, or `None`.

    It is looked for in `custom_objects`, then in the scopes, then among the registered, then in `module_objects`.
    """
    for objects in (custom_objects, *reversed(_scopes.get()), _REGISTERED, module_objects):
        if objects and name in objects:
            return objects[name]
    return None


class _Shared:
    """What has been written or made within one `sharing` block: objects that occur twice stay one object."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.written: list[Any] = []  # holds the objects, so that no other one gets the id of one of them
        self.made: dict[int, Any] = {}


class sharing:  # noqa: N801 - used like a function
    """Within the block, an object that occurs several times in what is serialized comes back as one object."""

    def __enter__(self) -> None:
        self._token = _shared.set(_shared.get() or _Shared())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _shared.reset(self._token)


def serialize(obj: Any) -> Any:
    """Returns an object as plain JSON values, from which `deserialize` makes an equal one.

    Args:
        obj: `None`, text, numbers, lists, tuples (which come back as lists), dicts with text keys, policies (those of
            floats by name), dtypes, an object with `get_config`, or a function or class that is registered or
            narrowcast's own.

    Returns:
        For an object, a dict of `class_name`, `config` and `registered_name`; layers that are built add `build_config`.

    Raises:
        ConfigError: the object cannot be made again by name.

    Example:
        >>> serialize({"units": 4, "dtype": DTypePolicy("float32")})
        {'units': 4, 'dtype': 'float32'}
    """
    if obj is None or isinstance(obj, bool | int | float | str):
        return obj
    if isinstance(obj, list | tuple):
        return [serialize(item) for item in obj]
    if isinstance(obj, Mapping) and not isinstance(obj, DTypePolicy):
        return {_text(key): serialize(value) for key, value in obj.items()}
    if isinstance(obj, DTypePolicy):
        return dtype_policies.serialize(obj)
    if hasattr(obj, "get_config") and not isinstance(obj, type):
        return _serialize_object(obj)
    if type(obj).__module__.partition(".")[0] == "torch" and type(obj).__name__ == "dtype":
        return dtypes.standardize(obj)
    if arrays.framework(obj) is not None:
        return _serialize_number(obj)
    if callable(obj) and hasattr(obj, "__name__"):
        return _serialize_callable(obj)
    raise ConfigError(
        "Object cannot be written as JSON",
        got={"type": f"{type(obj).__module__}.{type(obj).__qualname__}"},
        expected="plain values, policies, or an object with `get_config`",
        fix="Give its class a `get_config`, or leave it out of the config",
    )


def _text(key: Any) -> str:
    if not isinstance(key, str):
        raise ConfigError("Key in a config is not text", got={"key": key}, expected="text, as JSON has it")
    return key


def _serialize_number(obj: Any) -> Any:
    if getattr(obj, "ndim", 1) == 0:
        return obj.item()
    raise ConfigError(
        "Array stands in a config, which holds no weights",
        got={"shape": tuple(obj.shape)},
        expected="plain values",
        fix="Keep it as a weight or a buffer, which is saved beside the config",
    )


def _serialize_object(obj: Any) -> dict[str, Any]:
    cls = _class_of(obj)
    written: dict[str, Any] = {
        "class_name": cls.__name__,
        "config": serialize(obj.get_config()),
        "registered_name": _NAMES.get(cls),
    }
    build_config = obj.get_build_config() if hasattr(obj, "get_build_config") else None
    if build_config:
        written["build_config"] = serialize(build_config)
    shared = _shared.get()
    if shared is not None:
        if id(obj) not in shared.numbers:
            shared.numbers[id(obj)] = len(shared.written)
            shared.written.append(obj)
        written["shared_object_id"] = shared.numbers[id(obj)]
    return written


def _class_of(obj: Any) -> type:
    # A layer whose class was exchanged for one that carries a policy is written under its own class.
    cls: type = getattr(type(obj), "_narrowcast_base", type(obj))
    return cls


def _serialize_callable(obj: Any) -> dict[str, Any]:
    name = getattr(obj, "__name__", None)
    known = _NAMES.get(obj)
    if known is None and _BUILTIN.get(str(name)) is not obj:
        raise ConfigError(
            "Function is not registered, so it could not be found again",
            got={"function": obj},
            expected="a name of narrowcast's own functions, or a registered function",
            fix="Decorate it with `narrowcast.saving.register_serializable('MyPackage')`"
            + (", and give it a name: a lambda has none" if name == "<lambda>" else ""),
        )
    return {"class_name": "function", "config": known or name, "registered_name": known}


def deserialize(config: Any, custom_objects: Mapping[str, Any] | None = None) -> Any:
    """Returns the object that `serialize` turned into `config`, which stays as it is.

    Args:
        config: what `serialize` returned, or what Keras wrote of the classes that narrowcast has too. Anything that is
            no config of an object (an object itself, plain values) is returned as it is, its parts read.
        custom_objects: classes and functions by name.

    Raises:
        ConfigError: a class is unknown, or its config does not fit it.

    Example:
        >>> deserialize(serialize({"dtype": dtype_policies.get("int8_from_float32")}))
        {'dtype': <QuantizedDTypePolicy "int8_from_float32">}
    """
    try:
        return _deserialize(config, custom_objects)
    except RecursionError:
        raise ConfigError("Config is nested too deeply", expected="the config of a model") from None


def _deserialize(config: Any, custom_objects: Mapping[str, Any] | None) -> Any:
    if isinstance(config, list | tuple):
        return [_deserialize(item, custom_objects) for item in config]
    if not isinstance(config, dict):
        return config
    if not ("class_name" in config and "config" in config):
        return {key: _deserialize(value, custom_objects) for key, value in config.items()}
    shared, number = _shared.get(), config.get("shared_object_id")
    if shared is not None and number is not None and number in shared.made:
        return shared.made[number]
    obj = _make(config, custom_objects)
    if shared is not None and number is not None:
        shared.made[number] = obj
    return obj


def _make(config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None) -> Any:
    class_name, fields = config["class_name"], config["config"]
    if class_name == "function":
        return _find(config.get("registered_name") or fields, custom_objects, "Function")
    if isinstance(class_name, str) and class_name in _POLICIES and not config.get("registered_name"):
        return dtype_policies.deserialize(config, custom_objects)
    cls = _find(config.get("registered_name") or class_name, custom_objects, "Class")
    if not hasattr(cls, "from_config"):
        raise ConfigError(
            f"Class {class_name!r} cannot be made from a config",
            got={"class": cls},
            expected="a class with `from_config`",
        )
    if not isinstance(fields, Mapping):
        raise ConfigError(
            f"Config of {class_name!r} is not a table", got={"config": fields}, expected="arguments by name"
        )
    with CustomObjectScope(custom_objects):
        try:
            obj = cls.from_config({key: _deserialize(value, custom_objects) for key, value in fields.items()})
        except TypeError as error:
            if isinstance(error, NarrowcastError):
                raise
            raise ConfigError(f"Config does not fit {class_name!r}: {error}", got={"config": dict(fields)}) from error
        if config.get("build_config") and hasattr(obj, "build_from_config"):
            obj.build_from_config(config["build_config"])
    return obj


_POLICIES = frozenset(name for name in dtype_policies.__all__ if name.endswith(("Policy", "PolicyMap"))) | {"Policy"}


def _find(name: Any, custom_objects: Mapping[str, Any] | None, kind: str) -> Any:
    found = get_registered_object(name, custom_objects, _BUILTIN) if isinstance(name, str) else None
    if found is None:
        near = closest(str(name), [*(custom_objects or {}), *_REGISTERED, *_BUILTIN])
        raise ConfigError(
            f"{kind} {name!r} of a config is unknown",
            expected="one of narrowcast's own, or a registered one",
            suggestion=near[0] if near else None,
            fix="Import the module that registers it, or give it in `custom_objects`",
        )
    return found
