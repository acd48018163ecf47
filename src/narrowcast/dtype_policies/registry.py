"""The modes, and reading policies of any of them from names, configs and dtypes.

Every mode is one `Mode` record, registered by the file of its family. Nothing else knows modes by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from narrowcast.dtype_policies import dtypes
from narrowcast.dtype_policies.names import Choice, Grammar, Setting, join_name, split_name
from narrowcast.dtype_policies.policy import MIXED, DTypePolicy, FloatDTypePolicy, global_policy
from narrowcast.errors import PolicyError, PolicyTypeError, closest

__all__ = [
    "Mode",
    "asked",
    "deserialize",
    "find_mode",
    "get",
    "make",
    "mode_of",
    "modes",
    "parse_mode",
    "register",
    "register_class",
    "register_singleton",
    "serialize",
]


@dataclass(frozen=True)
class Mode:
    """What a mode is, as far as policies and plans need to know.

    Args:
        grammar: how it is written; its head is the mode's name.
        policy_class: the one class of its policies.
        kinds: the kinds of site that it can apply to, see `narrowcast.plan.tree.KINDS`; empty for any kind.
        summary: what it does, in a few words, for tables.
        options: settings that are in the config and not in the name.
        old_spellings: how former releases of Keras wrote the mode, and its present spelling; read in names and configs.
        is_quantized: whether its policies have a source and are named ``<mode>_from_<source>``.
        is_trainable: whether the parameters at its sites go on training.
        needs_calibration: whether applying it needs batches of inputs.
    """

    grammar: Grammar
    policy_class: type[DTypePolicy]
    kinds: tuple[str, ...] = ()
    summary: str = ""
    options: tuple[Setting | Choice, ...] = ()
    old_spellings: tuple[tuple[str, str], ...] = ()
    is_quantized: bool = True
    is_trainable: bool = False
    needs_calibration: bool = False

    @property
    def name(self) -> str:
        """The mode without its numbers: `int8/weight`, `gptq`."""
        return self.grammar.head

    def complete(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Returns every option of the mode, checked; those that are not given have their default.

        Raises:
            PolicyError: the mode has no such option, or the value is not allowed.
        """
        known = {option.name: option for option in self.options}
        for name, value in options.items():
            if name not in known:
                near = closest(name, known)
                raise PolicyError(
                    f"Quantization mode {self.name!r} has no setting {name}",
                    got={name: value},
                    expected=f"one of {', '.join(known)}" if known else "no settings beside the name",
                    suggestion=near[0] if near else None,
                )
        return {name: option.check(options.get(name, option.default), mode=self.name) for name, option in known.items()}


_MODES: dict[str, Mode] = {}
_CLASSES: dict[str, type[DTypePolicy]] = {}
_SINGLETONS: dict[str, DTypePolicy] = {}
_OLD_SPELLINGS: dict[str, str] = {}


def register(mode: Mode) -> None:
    """Adds a mode. Called when the file of its family is imported."""
    _MODES[mode.name] = mode
    _OLD_SPELLINGS.update(mode.old_spellings)
    register_class(mode.policy_class)


def register_class(policy_class: type[DTypePolicy], *names: str) -> None:
    """Makes `deserialize` know a class by its own name, or by `names`."""
    for name in names or (policy_class.__name__,):
        _CLASSES[name] = policy_class


def register_singleton(policy: DTypePolicy) -> None:
    """Makes `get` return this one object for its name."""
    _SINGLETONS[policy.name] = policy


def modes() -> tuple[Mode, ...]:
    """Returns every mode, `float` and `keep` too, in the order in which they were registered."""
    return tuple(_MODES.values())


def mode_of(policy: DTypePolicy) -> Mode:
    """Returns the mode of a policy: `float` and `keep` are modes too.

    Example:
        >>> mode_of(get("gptq/4/128_from_float32")).name, mode_of(get("float32")).name
        ('gptq', 'float')
    """
    if policy._is_map:
        raise PolicyTypeError("Map has no mode of its own", got={"policy": policy}, expected="a policy of one layer")
    return _MODES[policy._mode_name]


def find_mode(text: str) -> Mode | None:
    """Returns the quantization mode that `text` is, with or without its numbers; `None` if it is none.

    Example:
        >>> find_mode("gptq").name, find_mode("mixed_float16")
        ('gptq', None)
    """
    first, _, rest = text.partition("/")
    for head in (f"{first}/{rest.partition('/')[0]}", first):  # names of modes have at most two words
        mode = _MODES.get(head)
        if mode is not None and mode.is_quantized:
            return mode
    return None


def parse_mode(text: str) -> tuple[Mode, dict[str, int]]:
    """Returns the mode that `text` names, and the numbers in it.

    Raises:
        PolicyTypeError: `text` is not text.
        PolicyError: no mode is called so, or its numbers are missing or not allowed.

    Example:
        >>> mode, numbers = parse_mode("gptq/4/128")
        >>> mode.name, numbers
        ('gptq', {'weight_bits': 4, 'group_size': 128})
    """
    if not isinstance(text, str):
        raise PolicyTypeError("Quantization mode is not text", got={"mode": text}, expected="a mode such as 'int8'")
    mode = find_mode(text)
    if mode is not None and mode.grammar.fits(text):
        return mode, mode.grammar.parse(text)
    known = [str(other.grammar) for other in _MODES.values() if other.is_quantized]
    if mode is not None:  # int4 without its number, float8/curent: its family is what may have been meant
        family = mode.name.partition("/")[0]
        known = [grammar for grammar in known if grammar.partition("/")[0] == family]
    near = closest(text, known)
    raise PolicyError(
        "Quantization mode is incomplete" if mode is not None and mode.name == text else "Quantization mode is unknown",
        got={"mode": text},
        expected=f"one of {', '.join(known)}",
        suggestion=near[0] if near else None,
    )


def make(mode: str, source: Any = None, **options: Any) -> DTypePolicy:
    """Makes a quantized policy from its parts.

    Args:
        mode: the mode, with its numbers.
        source: the float policy to start from, or `keep`; `None` for the global policy.
        options: settings that are not in the name, such as `amax_history_length`.

    Example:
        >>> make("float8", "mixed_bfloat16", amax_history_length=16)
        <QuantizedFloat8DTypePolicy "float8_from_mixed_bfloat16", amax_history_length=16>
    """
    record, _ = parse_mode(mode)
    record.complete(options)
    return record.policy_class.from_config({"mode": mode, "source_name": source, **options})


def get(identifier: Any) -> DTypePolicy:
    """Returns the policy that `identifier` names, read as the `dtype=` of a layer.

    Args:
        identifier: a policy; a policy's name (`"mixed_float16"`, `"int8_from_float32"`, `"keep"`); a dtype by name or
            as an object of torch, NumPy or JAX; a config as `serialize` or Keras writes it; `None`: the global policy.
            `"int8"` is the dtype that variables are stored in; `asked` reads it as the mode.

    Raises:
        PolicyError: there is no such policy.

    Example:
        >>> get("int8_from_mixed_bfloat16")
        <QuantizedDTypePolicy "int8_from_mixed_bfloat16">
        >>> get("int8")
        <DTypePolicy "int8">
    """
    if identifier is None:
        return global_policy()
    if isinstance(identifier, DTypePolicy):
        return identifier
    if isinstance(identifier, Mapping):
        return deserialize(identifier)
    if isinstance(identifier, str):
        return _get_by_name(identifier)
    try:
        return DTypePolicy(dtypes.standardize(identifier))
    except PolicyError:
        raise PolicyError(
            "Policy cannot be read",
            got={"identifier": identifier},
            expected="a policy, a policy's name, a dtype, or a config",
        ) from None


def _get_by_name(name: str) -> DTypePolicy:
    if name in _SINGLETONS:
        return _SINGLETONS[name]
    mode, source = split_name(name)
    if source is not None:
        return make(_OLD_SPELLINGS.get(mode, mode), source)
    if name not in dtypes.ALL and find_mode(name) is not None:
        parse_mode(name)
        raise PolicyError(
            "Policy name has a quantization mode and no source",
            got={"name": name},
            expected="the form <mode>_from_<float policy>",
            suggestion=join_name(name, "mixed_bfloat16"),
        )
    return DTypePolicy(name)


def asked(value: Any) -> DTypePolicy:
    """Returns the policy that `value` asks for in a map, a policy file, on the command line or in `apply`.

    Like `get`, save that the name of a mode alone means that mode, starting from whatever dtype the layer has.

    Example:
        >>> asked("int8")
        <QuantizedDTypePolicy "int8_from_keep">
        >>> asked("float32")
        <DTypePolicy "float32">
    """
    if not isinstance(value, str) or split_name(value)[1] is not None:
        return get(value)
    if find_mode(value) is not None:
        return make(value, "keep")
    try:
        return get(value)
    except PolicyError:
        known = [str(mode.grammar) for mode in _MODES.values() if mode.is_quantized]
        near = closest(value, [*known, *_SINGLETONS, *dtypes.ALL, *MIXED])
        raise PolicyError(
            "Policy is unknown",
            got={"policy": value},
            expected=f"a mode ({', '.join(known)}), keep, a dtype, {', '.join(MIXED)}, or <mode>_from_<float policy>",
            suggestion=near[0] if near else None,
        ) from None


def serialize(policy: DTypePolicy) -> Any:
    """Returns `policy` as plain JSON values, from which `deserialize` makes an equal one.

    Float policies and `keep` are their names; all others are dicts of `class_name` and `config`, as in Keras.

    Example:
        >>> serialize(get("mixed_float16"))
        'mixed_float16'
        >>> serialize(get("int8_from_float32"))
        {'class_name': 'QuantizedDTypePolicy', 'config': {'mode': 'int8', 'source_name': 'float32'}}
    """
    if not isinstance(policy, DTypePolicy):
        raise PolicyTypeError("Only policies can be serialized", got={"policy": policy}, expected="a DTypePolicy")
    if type(policy) in (DTypePolicy, FloatDTypePolicy) or policy.name in _SINGLETONS:
        return policy.name
    return {"class_name": type(policy).__name__, "config": policy.get_config()}


def deserialize(config: Any, custom_objects: Mapping[str, Any] | None = None) -> DTypePolicy:
    """Returns the policy that `serialize`, here or in Keras, turned into `config`, which stays as it is.

    Args:
        config: a name, or a mapping with `class_name` and `config`; other entries that Keras writes are passed over.
        custom_objects: classes of policies by name, for those that are not narrowcast's own.

    Raises:
        PolicyError: it is not the config of a policy.

    Example:
        >>> deserialize({"class_name": "DTypePolicy", "config": {"name": "float32"}})
        <DTypePolicy "float32">
    """
    if isinstance(config, str):
        return _get_by_name(config)
    class_name = config.get("class_name") if isinstance(config, Mapping) else None
    fields = config.get("config", {}) if isinstance(config, Mapping) else None
    if not isinstance(class_name, str) or not isinstance(fields, Mapping):
        raise PolicyError(
            "Policy config cannot be read",
            got={"config": config},
            expected="a policy's name, or a mapping with 'class_name' and 'config'",
        )
    names = (name for name in (config.get("registered_name"), class_name) if isinstance(name, str))
    policy_class = (
        next((custom_objects[name] for name in names if name in custom_objects), None) if custom_objects else None
    )
    if policy_class is None and "mode" in fields and class_name in _CLASSES:
        return make(**_quantized_fields(fields))
    policy_class = policy_class or _CLASSES.get(class_name)
    if not (isinstance(policy_class, type) and issubclass(policy_class, DTypePolicy)):
        near = closest(class_name, _CLASSES)
        raise PolicyError(
            "Class is not the class of a policy",
            got={"class_name": class_name},
            expected=f"one of {', '.join(sorted(_CLASSES))}",
            suggestion=near[0] if near else None,
            fix="Pass a class of your own in custom_objects",
        )
    return policy_class.from_config(fields, custom_objects=custom_objects)


def _quantized_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `make` for the config of a quantized policy.

    The class is that of the mode, whatever class wrote it: Keras writes some modes by several.
    """
    fields = dict(fields)
    mode = fields.pop("mode")
    spelling = _OLD_SPELLINGS.get(mode, mode) if isinstance(mode, str) else mode
    return {"mode": spelling, "source": fields.pop("source_name", None), **fields}


register(
    Mode(
        Grammar("float"),
        DTypePolicy,
        summary="computes and stores in the dtypes named",
        is_quantized=False,
        is_trainable=True,
    )
)
register_class(FloatDTypePolicy)
register_class(DTypePolicy, "Policy")  # its name in files of Keras 2
