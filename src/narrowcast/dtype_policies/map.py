"""`DTypePolicyMap`: which layer has which policy, by exact path or by regular expression."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from narrowcast.dtype_policies import registry
from narrowcast.dtype_policies.default import dtype_policy
from narrowcast.dtype_policies.keep import keep
from narrowcast.dtype_policies.pattern import Pattern, PatternIndex
from narrowcast.dtype_policies.policy import DTypePolicy
from narrowcast.errors import (
    DuplicateRuleError,
    MissingRuleError,
    NarrowcastError,
    OverlapError,
    PolicyError,
    PolicyTypeError,
    closest,
)

__all__ = ["DTypePolicyMap", "Match"]

_NOT_GIVEN: Any = object()


@dataclass(frozen=True, slots=True)
class Match:
    """The rules of a map that match one path.

    Args:
        exact: the key that is the path itself, if there is one.
        patterns: the other keys that match the whole path as regular expressions, in the order of the map.
    """

    exact: str | None
    patterns: tuple[str, ...]


class DTypePolicyMap(DTypePolicy, MutableMapping[str, DTypePolicy]):
    r"""Which layer has which policy, by exact path or by regular expression.

    `map[path]` looks a layer's path up. The key that is the path itself comes first; otherwise every key is read as a
    regular expression that must match the whole path (`encoder` is one layer, `encoder/.*` is all below it). Among
    matching patterns, `keep` wins over all others, so that "all but these" is two rules. Patterns that give one path
    different policies are an error; where none matches, the default policy is given.

    `in`, `len`, iteration and `del` speak of keys, not of paths. A key that is there already cannot be assigned again;
    `replace` replaces.

    A map can be changed, so it has no hash. It is true, also when it is empty. Look-ups may run in several threads
    while one of them changes the map.

    Args:
        default_policy: the policy of paths that no key matches, in any form that values have. `None` is the global
            policy, whatever it is when a path is looked up.
        policy_map: a dict from keys to policies. It is copied. Values are policies, or what `asked` reads as one: names
            of policies, dtypes, configs, and names of modes (`"int8"` quantizes a layer from the dtype it has).
        optional: keys in `policy_map` that may match nothing in a model, for maps shared between models.

    Raises:
        PolicyTypeError: `policy_map` is not a dict, or a key is not text.
        PolicyError: a value is not a policy, or is itself a map.
        PatternError: a key is not a regular expression, can backtrack without end, or is too long.

    Example:
        >>> policies = DTypePolicyMap("float32", {r"encoder/.*": "bfloat16", r"encoder/layer/\d+/norm": "keep"})
        >>> policies["encoder/layer/0/query"], policies["encoder/layer/0/norm"], policies["pooler"]
        (<DTypePolicy "bfloat16">, <KeepPolicy "keep">, <DTypePolicy "float32">)
        >>> policies.rule_for("encoder/layer/0/query")
        'encoder/.*'
    """

    _is_map: ClassVar[bool] = True
    __hash__ = None  # type: ignore[assignment]
    _default: DTypePolicy | None
    _rules: dict[str, DTypePolicy]
    _optional: set[str]
    _index: PatternIndex
    _lock: threading.RLock

    def __init__(
        self,
        default_policy: Any = None,
        policy_map: dict[str, Any] | None = None,
        *,
        optional: Iterable[str] = (),
    ) -> None:
        if policy_map is not None and not isinstance(policy_map, dict):
            raise PolicyTypeError(
                "Rules of a map are not a dict", got={"policy_map": policy_map}, expected="a dict from keys to policies"
            )
        default = None if default_policy is None else _read("default policy", default_policy)
        self.__dict__.update(
            _default=default, _rules={}, _optional=set(), _index=PatternIndex(), _lock=threading.RLock()
        )
        self.update(policy_map or {})
        self.mark_optional(*optional)

    # Looking up a path

    def match(self, path: str) -> Match:
        """Returns every rule that matches `path`.

        Raises:
            PolicyTypeError: `path` is not text.
            PolicyError: `path` is too long.
        """
        if not isinstance(path, str):
            raise PolicyTypeError("Path is not text", got={"path": path}, expected="the path of a layer")
        with self._lock:
            exact = path if path in self._rules else None
            return Match(exact, tuple(key for key in self._index.matching(path) if key != exact))

    def rule_for(self, path: str) -> str | None:
        """Returns the key whose policy `path` gets; `None` where no key matches and it gets the default.

        Raises:
            OverlapError: patterns that match `path` give it different policies.
        """
        if isinstance(path, str) and path in self._rules:
            return path
        with self._lock:
            patterns = self.match(path).patterns
            for key in patterns:
                if self._rules[key] is keep:
                    return key
            if len({self._rules[key] for key in patterns}) > 1:
                raise OverlapError(
                    f"Path {path!r} matches multiple dtype policy keys of the map, which give it different policies",
                    got={"rules": {key: self._rules[key] for key in patterns}},
                    expected="at most one policy for a path",
                    fix="Add a rule for the exact path, or make the patterns exclude each other",
                )
            return patterns[0] if patterns else None

    def __getitem__(self, key: str) -> DTypePolicy:
        """Returns the policy of the layer at a path.

        Args:
            key: the path. A key that equals it comes first, then keys as regular expressions that match the whole of
                it, then the default policy.

        Raises:
            OverlapError: patterns that match the path give it different policies.
        """
        with self._lock:
            rule = self.rule_for(key)
            return self.default_policy if rule is None else self._rules[rule]

    def get(self, key: str, default: Any = None) -> Any:
        """Looks a path up like `map[key]`, but returns `default` where no key matches."""
        with self._lock:
            rule = self.rule_for(key)
            return default if rule is None else self._rules[rule]

    # Keys

    def __contains__(self, key: object) -> bool:
        return key in self._rules

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._rules))

    def __len__(self) -> int:
        return len(self._rules)

    def __bool__(self) -> bool:
        return True

    def __setitem__(self, key: str, policy: Any) -> None:
        """Adds a rule.

        Raises:
            DuplicateRuleError: the map has this key.
            PolicyTypeError: the key is not text.
            PatternError: the key is not a usable regular expression.
            PolicyError: `policy` is not a policy.
        """
        self.update(((key, policy),))

    def __delitem__(self, key: str) -> None:
        with self._lock:
            self._require(key)
            del self._rules[key]
            self._optional.discard(key)
            self._index.discard(key)

    def replace(self, key: str, policy: Any) -> None:
        """Gives a key that the map has another policy; its place in the map stays.

        Raises:
            MissingRuleError: the map has no such key.
        """
        with self._lock:
            self._require(key)
            self._rules[key] = _read(f"rule {key!r}", policy)

    def update(self, other: Any = (), /, **kwds: Any) -> None:
        """Adds all rules of `other` and `kwds`, or none: an error leaves the map as it was.

        Args:
            other: a mapping, or pairs of key and policy. Rules that are optional in another map are so here too.
            kwds: more rules.
        """
        pairs = [(key, other[key]) for key in other.keys()] if hasattr(other, "keys") else list(other)  # noqa: SIM118
        added: dict[str, tuple[DTypePolicy, Pattern]] = {}
        with self._lock:
            for key, value in [*pairs, *kwds.items()]:
                if not isinstance(key, str):
                    raise PolicyTypeError(
                        "Key is not text", got={"key": key}, expected="the path of a layer, or a regular expression"
                    )
                if key in self._rules or key in added:
                    raise DuplicateRuleError(
                        f"Key {key!r} is in the map already",
                        got={"policy": value},
                        expected="a new key",
                        fix="Use `replace` to give a key another policy",
                    )
                added[key] = _read(f"rule {key!r}", value), Pattern(key)
            for key, (policy, pattern) in added.items():
                self._rules[key] = policy
                self._index.add(key, pattern)
            if isinstance(other, DTypePolicyMap):
                self._optional.update(other.optional)

    def setdefault(self, key: str, default: Any = None) -> DTypePolicy:
        """Returns the policy of a key; where the map has no such key, adds it with `default` first."""
        with self._lock:
            if key not in self._rules:
                self[key] = default
            return self._rules[key]

    def pop(self, key: str, default: Any = _NOT_GIVEN) -> Any:
        """Removes a key and returns its policy; where the map has no such key, returns `default` if one is given.

        Raises:
            MissingRuleError: the map has no such key, and no default is given.
        """
        with self._lock:
            if key not in self._rules and default is not _NOT_GIVEN:
                return default
            self._require(key)
            policy = self._rules[key]
            del self[key]
            return policy

    def clear(self) -> None:
        """Removes all rules; the default policy stays."""
        with self._lock:
            for key in self:
                del self[key]

    def _require(self, key: Any) -> None:
        if key not in self._rules:
            near = closest(str(key), self._rules)
            raise MissingRuleError(
                "Key is not in the map",
                got={"key": key},
                expected=f"one of its {len(self)} keys",
                suggestion=near[0] if near else None,
            )

    @property
    def optional(self) -> frozenset[str]:
        """The keys that may match nothing in a model."""
        return frozenset(self._optional)

    def mark_optional(self, *keys: str) -> None:
        """Lets keys of the map match nothing in a model; such a key is an error otherwise when the map is bound.

        Raises:
            MissingRuleError: the map has no such key.
        """
        with self._lock:
            for key in keys:
                self._require(key)
            self._optional.update(keys)

    # A map as a policy is its default

    @property
    def has_default(self) -> bool:
        """Whether a default policy was given; without one it is the global policy."""
        return self._default is not None

    @property
    def default_policy(self) -> DTypePolicy:
        """The policy of paths that no key matches: the one given, else the global policy at this moment."""
        return dtype_policy() if self._default is None else self._default

    @property
    def name(self) -> str:
        """`map_` and the name of the default policy."""
        return f"map_{self.default_policy.name}"

    @property
    def compute_dtype(self) -> str | None:
        """The compute dtype of the default policy."""
        return self.default_policy.compute_dtype

    @property
    def variable_dtype(self) -> str | None:
        """The variable dtype of the default policy."""
        return self.default_policy.variable_dtype

    @property
    def quantization_mode(self) -> str | None:
        """The quantization mode of the default policy."""
        return self.default_policy.quantization_mode

    @property
    def source(self) -> DTypePolicy | None:
        """The source of the default policy."""
        return self.default_policy.source

    # A map as a value

    def get_config(self) -> dict[str, Any]:
        """Returns the map as plain JSON values: `default_policy` (`None` where none was given), `policy_map`, and
        `optional` where there are such keys.
        """
        with self._lock:
            config: dict[str, Any] = {
                "default_policy": None if self._default is None else registry.serialize(self._default),
                "policy_map": {key: registry.serialize(policy) for key, policy in self._rules.items()},
            }
            if self._optional:
                config["optional"] = [key for key in self._rules if key in self._optional]
        return config

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None) -> Self:
        """Makes the map whose `get_config`, here or in Keras, returned `config`, which stays as it is.

        Args:
            config: `default_policy`, `policy_map` and `optional`.
            custom_objects: classes of policies by name, for those that are not narrowcast's own.
        """

        def read(value: Any) -> DTypePolicy:
            return value if isinstance(value, DTypePolicy) else registry.deserialize(value, custom_objects)

        fields = dict(config)
        if fields.get("default_policy") is not None:
            fields["default_policy"] = read(fields["default_policy"])
        if isinstance(fields.get("policy_map"), Mapping):
            fields["policy_map"] = {key: read(value) for key, value in fields["policy_map"].items()}
        return cls(**fields)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DTypePolicyMap):
            return NotImplemented
        return self._state() == other._state()

    def _state(self) -> tuple[Any, ...]:
        with self._lock:
            return self._default, dict(self._rules), set(self._optional)

    def __copy__(self) -> Self:
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: Any) -> Self:
        default, rules, optional = self._state()  # policies never change, so they are not copied
        return type(self)(default, rules, optional=optional)

    def __reduce__(self) -> tuple[Any, ...]:
        return _remake, (type(self), *self._state())

    def __repr__(self) -> str:
        default, rules, _ = self._state()
        return f"<DTypePolicyMap default_policy={default!r}, policy_map={rules!r}>"


def _remake(
    cls: type[DTypePolicyMap], default: DTypePolicy | None, rules: dict[str, DTypePolicy], optional: set[str]
) -> DTypePolicyMap:
    return cls(default, rules, optional=optional)


def _read(what: str, value: Any) -> DTypePolicy:
    """Reads a value of a map; an error says which one it was."""
    try:
        policy = registry.asked(value)
    except NarrowcastError as error:
        raise PolicyError(
            f"Policy of {what} cannot be read: {error.problem}",
            got=error.got,
            expected=error.expected,
            suggestion=error.suggestion,
            fix=error.fix,
        ) from error
    if policy._is_map:
        raise PolicyError(f"Policy of {what} is itself a map", got={"policy": policy}, expected="a policy of one layer")
    return policy


registry.register_class(DTypePolicyMap)
