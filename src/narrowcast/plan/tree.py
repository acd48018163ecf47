"""The tree of a model: every place a policy can apply to, as plain data.

A framework package reads its models into a `Tree`; everything after that (binding, explaining, comparing, saving)
works on the tree alone, so it is the same for a live model, a model on the meta device and a saved file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from narrowcast.dtype_policies import DTypePolicy, deserialize, dtypes, serialize
from narrowcast.errors import PathError, closest

if TYPE_CHECKING:
    from narrowcast.plan.table import Table

__all__ = ["KINDS", "Member", "Parameter", "Site", "Tree"]

KINDS = (
    "linear",
    "embedding",
    "conv",
    "norm",
    "attention",
    "recurrent",
    "experts",
    "loss",
    "softmax",
    "container",
    "other",
)
"""The kinds of site. `container` has children and no parameters of its own; `other` is any other module: a custom one,
or one that has neither parameters nor children (an activation, a dropout)."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a site, by its name within the module.

    Args:
        name: attribute path within the module that owns it, with dots where it lies deeper (`out_proj.weight` of an
            attention module).
        shape: its shape, in the framework's own axis order.
        dtype: its dtype by name, as in `narrowcast.dtype_policies.dtypes`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_elements(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """How many bytes its values take."""
        return (self.num_elements * dtypes.get(self.dtype).bits + 7) // 8


@dataclass(frozen=True, slots=True)
class Member:
    """One module of a site. A site has several only where modules share a tied parameter.

    Args:
        paths: every path that leads to this module; several where the module itself is shared. The first is the one
            the framework finds first.
        kind: one of `KINDS`.
        class_name: the module's class, qualified (`torch.nn.modules.linear.Linear`).
        parameters: the parameters that the module owns (for kinds that own a subtree, those of the subtree).
        policy: the policy that the module carries at present, or `None` if narrowcast never touched it.
        details: facts about the module that decide what can be done at it, by name (`groups`, `transposed`, ...).
            Plain numbers, strings and booleans.
    """

    paths: tuple[str, ...]
    kind: str
    class_name: str
    parameters: tuple[Parameter, ...] = ()
    policy: DTypePolicy | None = None
    details: tuple[tuple[str, Any], ...] = ()

    def detail(self, name: str, default: Any = None) -> Any:
        """Returns the fact called `name`, or `default`."""
        return dict(self.details).get(name, default)


@dataclass(frozen=True, slots=True)
class Site:
    """A place a policy can apply to: a module, or several modules that share a tied parameter.

    Args:
        members: the modules, in the order of the model. One, unless a parameter is tied.
        device: the device of its parameters (`cpu`, `meta`, `cuda:0`), or `''` where it has none.
        tied: the names of the shared parameters, as full dotted names of the model, grouped: one tuple for each shared
            tensor.
    """

    members: tuple[Member, ...]
    device: str = ""
    tied: tuple[tuple[str, ...], ...] = ()

    @property
    def path(self) -> str:
        """The first path: the name the site goes by."""
        return self.members[0].paths[0]

    @property
    def paths(self) -> tuple[str, ...]:
        """Every path that leads to the site."""
        return tuple(path for member in self.members for path in member.paths)

    @property
    def kind(self) -> str:
        """The kind of the first member."""
        return self.members[0].kind

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of all members, each once, in order."""
        return tuple(dict.fromkeys(member.kind for member in self.members))

    @property
    def class_name(self) -> str:
        """The qualified class of the first member."""
        return self.members[0].class_name

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """The parameters of all members; a tied one once."""
        if not self.tied:
            return tuple(parameter for member in self.members for parameter in member.parameters)
        seen: set[str] = set()
        found = []
        alias = {name: group[0] for group in self.tied for name in group}
        for member in self.members:
            for parameter in member.parameters:
                full = ".".join(filter(None, [member.paths[0].replace("/", "."), parameter.name]))
                key = alias.get(full, full)
                if key not in seen:
                    seen.add(key)
                    found.append(parameter)
        return tuple(found)

    @property
    def policy(self) -> DTypePolicy | None:
        """The policy that the site carries at present, or `None`."""
        return self.members[0].policy

    @property
    def dtype(self) -> str | None:
        """The dtype that holds most of the site's floating parameter bytes, or `None` if it has none."""
        sizes: dict[str, int] = {}
        for parameter in self.parameters:
            if dtypes.get(parameter.dtype).is_floating:
                sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + max(parameter.num_bytes, 1)
        return max(sizes, key=lambda name: sizes[name]) if sizes else None

    @property
    def num_bytes(self) -> int:
        """The bytes of its parameters; a tied parameter counts once."""
        return sum(parameter.num_bytes for parameter in self.parameters)


@dataclass(frozen=True)
class Tree:
    """All sites of one model, in the order in which the model registers them. The first is the root, `''`.

    Args:
        sites: the sites.
        framework: `torch`, `jax` or `keras`.
        name: what the model is called in reports (its class).

    Example:
        >>> weight = Parameter("weight", (2, 3), "float32")
        >>> root = Site((Member(("",), "container", "Net"),))
        >>> tree = Tree((root, Site((Member(("head",), "linear", "Linear", (weight,)),))), "torch")
        >>> tree["head"].num_bytes
        24
        >>> len(tree)
        2
    """

    sites: tuple[Site, ...]
    framework: str = "torch"
    name: str = "model"

    @cached_property
    def _by_path(self) -> Mapping[str, Site]:
        return {path: site for site in self.sites for path in site.paths}

    @property
    def paths(self) -> tuple[str, ...]:
        """Every path of every site."""
        return tuple(self._by_path)

    @property
    def num_bytes(self) -> int:
        """The bytes of all parameters, each once."""
        return sum(site.num_bytes for site in self.sites)

    @cached_property
    def dtype(self) -> str | None:
        """The dtype that holds most of the floating parameter bytes, or `None` if there are none."""
        sizes: dict[str, int] = {}
        for site in self.sites:
            if site.dtype is not None:
                sizes[site.dtype] = sizes.get(site.dtype, 0) + site.num_bytes
        return max(sizes, key=lambda name: sizes[name]) if sizes else None

    def to_json(self) -> dict[str, Any]:
        """Returns the tree as plain JSON values, from which `from_json` makes an equal one."""
        return {
            "name": self.name,
            "framework": self.framework,
            "sites": [
                {
                    "members": [_member_to_json(member) for member in site.members],
                    "device": site.device,
                    "tied": [list(names) for names in site.tied],
                }
                for site in self.sites
            ],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Tree:
        """Makes the tree that `to_json` returned."""
        sites = tuple(
            Site(
                tuple(_member_from_json(member) for member in site["members"]),
                str(site["device"]),
                tuple(tuple(map(str, names)) for names in site["tied"]),
            )
            for site in data["sites"]
        )
        if not all(site.members for site in sites):
            raise ValueError("a site has no member")
        return cls(sites, data["framework"], data["name"])

    def __str__(self) -> str:
        return self.table().to_text()

    def _repr_html_(self) -> str:
        return self.table().to_html()

    def table(self, *, every: bool = False) -> Table:
        """Returns the layers as a table: the paths that rules are written for, and what stands there.

        Args:
            every: whether each layer has a row of its own, those without parameters too. Otherwise layers that differ
                only in the numbers of their paths are one row.
        """
        from narrowcast.plan.tree_table import tree_table

        return tree_table(self, every=every)

    def __len__(self) -> int:
        return len(self.sites)

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    def __contains__(self, path: object) -> bool:
        return path in self._by_path

    def __getitem__(self, path: str) -> Site:
        """Returns the site at `path`.

        Raises:
            PathError: no site has this path; the nearest one is suggested.
        """
        try:
            return self._by_path[path]
        except KeyError:
            near = closest(str(path), self._by_path)
            raise PathError(
                f"Path '{path}' is not in {self.name}",
                expected="the attribute path of a layer, joined by '/'",
                suggestion=near[0] if near else None,
                fix="List the paths with `narrowcast plan MODEL`",
            ) from None


def _member_to_json(member: Member) -> dict[str, Any]:
    return {
        "paths": list(member.paths),
        "kind": member.kind,
        "class": member.class_name,
        "parameters": [[p.name, list(p.shape), p.dtype] for p in member.parameters],
        "policy": None if member.policy is None else serialize(member.policy),
        "details": dict(member.details),
    }


def _member_from_json(data: Mapping[str, Any]) -> Member:
    paths, kind, class_name = data["paths"], data["kind"], data["class"]
    if not paths or not all(isinstance(text, str) for text in (*paths, class_name)) or kind not in KINDS:
        raise ValueError(f"a member has the paths {paths!r}, the kind {kind!r} and the class {class_name!r}")
    return Member(
        tuple(paths),
        kind,
        class_name,
        tuple(_parameter_from_json(*parameter) for parameter in data["parameters"]),
        None if data["policy"] is None else deserialize(data["policy"]),
        tuple(data["details"].items()),
    )


def _parameter_from_json(name: str, shape: list[int], dtype: str) -> Parameter:
    if not isinstance(name, str) or any(type(length) is not int or length < 0 for length in shape):
        raise ValueError(f"a parameter has the name {name!r} and the shape {shape!r}")
    return Parameter(name, tuple(shape), dtypes.get(dtype).name)
