"""What PyTorch can carry out at a site, asked by `bind` before anything is built."""

from __future__ import annotations

from narrowcast.dtype_policies import DTypePolicy, dtypes, registry
from narrowcast.errors import UnsupportedError
from narrowcast.plan.carrier import Status, Verdict
from narrowcast.plan.tree import Member, Site
from narrowcast.torch import scheme
from narrowcast.torch.casting import describe_kernel

__all__ = ["TorchCarrier"]


class TorchCarrier:
    """Answers for every registered scheme of PyTorch. See `narrowcast.plan.carrier.Carrier`."""

    def judge(self, site: Site, policy: DTypePolicy) -> Verdict:
        """Says whether every module of `site` can carry `policy`, with which kernel and at how many bytes.

        Raises:
            UnsupportedError: no kind of layer has this mode on PyTorch yet.
        """
        mode = registry.mode_of(policy).name
        if mode not in scheme.carried_modes():
            raise UnsupportedError(
                f"Mode {mode!r} is not carried out on PyTorch yet",
                got={"policy": policy.name},
                expected=f"one of {', '.join(sorted(set(scheme.carried_modes()) - {'keep'}))}",
                fix="Choose another policy for these layers; the map itself is valid and can be written and read",
            )
        verdicts = []
        for member in site.members:
            found = scheme.find(policy, member.kind)
            if found is None:
                reason = f"{mode} does not exist for {_named(member.kind)}"
                if len(site.members) > 1:
                    reason = f"shares a parameter with {member.paths[0]!r}, and {reason}"
                return Verdict(Status.NOT_A_TARGET, reason=reason)
            verdicts.append(found.judge(site, member, policy))
        if len(verdicts) == 1:
            return verdicts[0]
        return _combine(site, policy, verdicts)

    def kernel(self, site: Site) -> str:
        """Says what runs at `site` now, in words; `''` where it has no floating parameters."""
        if site.dtype is None:
            return ""
        return describe_kernel(site.members[0], site.dtype, site.device)


def _named(kind: str) -> str:
    if kind == "other":
        return "a module of its own kind"
    return f"an {kind} layer" if kind[0] in "ae" else f"a {kind} layer"


def _combine(site: Site, policy: DTypePolicy, verdicts: list[Verdict]) -> Verdict:
    """One verdict for modules that share a parameter: the worst status; the shared bytes once."""
    worst = next((v for v in verdicts if v.status is not Status.APPLIED), None)
    if worst is not None:
        return worst
    tied = {name for group in site.tied for name in group}
    own, shared = 0, 0
    for member, verdict in zip(site.members, verdicts, strict=True):
        untied = sum(
            p.num_elements * dtypes.get(policy.variable_dtype or p.dtype).bits // 8
            for p in member.parameters
            if _full_name(member, p.name) not in tied
        )
        own += untied
        # What is left of the member's bytes is the shared tensor in its stored form.
        shared = max(shared, verdict.bytes_after - untied)
    reasons = dict.fromkeys(v.reason for v in verdicts if v.reason)
    return Verdict(
        Status.APPLIED,
        reason="; ".join(reasons),
        bytes_after=own + shared,
        bytes_kernel=sum(v.bytes_kernel for v in verdicts),
        kernel=verdicts[0].kernel,
    )


def _full_name(member: Member, name: str) -> str:
    return ".".join(filter(None, [member.paths[0].replace("/", "."), name]))
