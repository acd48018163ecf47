"""Trees and a carrier made by hand: plans need no framework."""

from __future__ import annotations

from typing import Any

from narrowcast.dtype_policies import DTypePolicy, registry
from narrowcast.errors import UnsupportedError
from narrowcast.plan import Member, Parameter, Plan, Site, Status, Tree, Verdict
from narrowcast.plan.bind import bind


def site(
    *paths: str,
    kind: str = "linear",
    shape: tuple[int, ...] | None = (64, 32),
    dtype: str = "float32",
    policy: DTypePolicy | None = None,
    details: tuple[tuple[str, Any], ...] = (),
) -> Site:
    parameters = () if shape is None else (Parameter("weight", shape, dtype),)
    return Site((Member(paths, kind, f"net.{kind.title()}", parameters, policy, details),), "cpu" if parameters else "")


def container(*paths: str) -> Site:
    return site(*paths, kind="container", shape=None)


def encoder(num_layers: int = 3, **kwargs: Any) -> Tree:
    """Embedding, layers of query, small and norm, head."""
    sites = [container(""), site("embedding", kind="embedding", shape=(100, 32), **kwargs), container("layer")]
    for i in range(num_layers):
        sites += [
            container(f"layer/{i}"),
            site(f"layer/{i}/query", **kwargs),
            site(f"layer/{i}/small", shape=(4, 32), **kwargs),
            site(f"layer/{i}/norm", kind="norm", shape=(32,), **kwargs),
        ]
    return Tree((*sites, site("head", shape=(100, 32), **kwargs)), "torch", "Encoder")


def tied(*, first: str = "embedding", second: str = "head") -> Tree:
    """Two modules that share one weight, and a linear layer beside them."""
    weight = Parameter("weight", (100, 32), "float32")
    members = (
        Member((first,), "embedding", "net.Embedding", (weight,)),
        Member((second,), "linear", "net.Linear", (weight, Parameter("bias", (100,), "float32"))),
    )
    both = Site(members, "cpu", ((f"{first}.weight", f"{second}.weight"),))
    return Tree((container(""), both, site("dense")), "torch", "Tied")


class FakeCarrier:
    """int8 for linear layers of 8 outputs or more, at a quarter of the bytes; float policies everywhere."""

    def __init__(self) -> None:
        self.num_judged = 0

    def judge(self, site: Site, policy: DTypePolicy) -> Verdict:
        self.num_judged += 1
        mode = registry.mode_of(policy)
        if mode.name == "float":
            if site.members[0].detail("refuses"):
                return Verdict(Status.FELL_BACK, site.members[0].detail("refuses"))
            return Verdict(Status.APPLIED, "", site.num_bytes, 0, f"{policy.compute_dtype} kernel")
        if mode.name != "int8":
            raise UnsupportedError(f"Mode {mode.name!r} is not carried out here", fix="Wait")
        if set(site.kinds) - {"linear"}:
            return Verdict(Status.NOT_A_TARGET, f"int8 does not exist for {site.kinds}")
        if site.parameters[0].shape[0] < 8:
            return Verdict(Status.FELL_BACK, "fewer than 8 outputs")
        return Verdict(Status.APPLIED, "", site.num_bytes // 4, 16, "int8 kernel", "float32 kernel")

    def kernel(self, site: Site) -> str:
        return f"{site.dtype} kernel"


def plan(tree: Tree, policy: Any, **kwargs: Any) -> Plan:
    return bind(tree, policy, FakeCarrier(), **kwargs)
