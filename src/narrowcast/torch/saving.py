"""Saving a model with its policies, and loading it without quantizing again.

A saved folder holds `model.safetensors` (or shards with an index) and `narrowcast.json`. The tensors are the stored
forms: what `state_dict` holds, a shared tensor once. Loading rebuilds the schemes from the plan on a fresh model of the
same architecture, checks everything, and only then changes the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.checkpoint import OWNED, Manifest, folder_of, read_tensors, staged, write_tensors
from narrowcast.dtype_policies import DTypePolicyMap
from narrowcast.errors import CheckpointError, ModelError, NarrowcastError, TreeMismatchError, UnsupportedError
from narrowcast.plan.plan import Plan
from narrowcast.plan.tree import Member, Site, Tree
from narrowcast.torch import fused, scheme
from narrowcast.torch.amp import expect_scaler
from narrowcast.torch.apply import (
    _attach,
    asked_of,
    carries_out,
    modules_by_path,
    plan,
    plan_of,
    trainable_tensors,
)
from narrowcast.torch.architecture import describe, make, make_ready
from narrowcast.torch.kinds import state_prefix, working_module
from narrowcast.torch.scheme import Change
from narrowcast.torch.tree import tree

__all__ = ["load", "save"]

DEFAULT_SHARD_BYTES = 5_000_000_000


def save(model: nn.Module, folder: str | Path, *, max_shard_bytes: int = DEFAULT_SHARD_BYTES) -> None:
    """Writes the model's tensors and policies to a folder: all of it or nothing.

    Args:
        model: the model; carrying policies or not, on any device but `meta`. The file is the same from every device.
        folder: made if missing. Other files in it stay.
        max_shard_bytes: above this the tensors are split into several files. At least 1.

    Raises:
        ModelError: a tensor has no data (meta), or the model's state holds something that is not a tensor.
        CheckpointError: the files cannot be written; what the folder held before is unchanged.

    Example:
        >>> import tempfile, torch
        >>> folder = tempfile.mkdtemp()
        >>> save(torch.nn.Linear(4, 2), folder)
        >>> sorted(path.name for path in Path(folder).iterdir())
        ['model.safetensors', 'narrowcast.json']
    """
    if type(max_shard_bytes) is not int or max_shard_bytes < 1:
        raise ModelError(
            "A shard's size is not usable",
            got={"max_shard_bytes": max_shard_bytes},
            expected="a whole number of bytes, at least 1",
        )
    tensors, aliases = _unshare(_state(model))
    present = plan(model, DTypePolicyMap())
    attached = plan_of(model)
    if attached is None or _outcome(attached) != _outcome(present):
        # Sites were changed after `apply` (or the root was wrapped): what is there now is what is saved.
        attached = present
    target = folder_of(folder)
    with staged(target, owned=OWNED) as staging:
        files = write_tensors(
            tensors, staging, framework="torch", max_shard_bytes=max_shard_bytes, metadata={"format": "pt"}
        )
        architecture = describe(model)
        Manifest("torch", attached.policy, attached, files, aliases, architecture).write(staging)


def load(model: nn.Module | None, folder: str | Path, *, custom_objects: Mapping[str, Any] | None = None) -> nn.Module:
    """Gives a fresh model the policies and tensors of a saved folder, in place, and returns it.

    Nothing is quantized again: the stored forms are taken from the file. Parameters stay the same objects and take
    the file's dtype; a model on the meta device gets its tensors on the CPU.

    Args:
        model: a model of the architecture that was saved, carrying no policy. Layers of `narrowcast.layers`, which
            carry one from the beginning, get that of the file; those that are not built are built. `None` makes the
            model from the folder alone, in eval mode, which a model made of such layers allows.
        folder: what `save` wrote.
        custom_objects: without a model, classes and functions by name that are not registered.

    Raises:
        CheckpointError: the folder is incomplete, corrupt, or of a newer format. The model is unchanged.
        TreeMismatchError: the layers are not those that were saved; lists the differences. The model is unchanged.
        ConfigError: without a model, a class of the saved config is unknown or does not fit it.

    Example:
        >>> import tempfile, torch
        >>> import narrowcast
        >>> folder = tempfile.mkdtemp()
        >>> model = narrowcast.apply(torch.nn.Sequential(torch.nn.Linear(8, 8)), "int8")
        >>> save(model, folder)
        >>> fresh = load(torch.nn.Sequential(torch.nn.Linear(8, 8)), folder)
        >>> x = torch.randn(2, 8)
        >>> torch.equal(fresh(x), model(x))
        True
    """
    source = folder_of(folder)
    manifest = Manifest.read(source)
    if manifest.framework != "torch":
        raise CheckpointError(
            f"Saved model in {str(source)!r} is of another framework",
            got={"framework": manifest.framework},
            expected="'torch'",
            fix="Load it with the framework that saved it",
        )
    with trainable_tensors():
        if model is None:
            model = make(manifest.architecture, custom_objects)
        put_back = make_ready(model, manifest.architecture)
        try:
            _load_into(model, source, manifest)
        except BaseException:
            put_back()
            raise
    return model


def _load_into(model: nn.Module, source: Path, manifest: Manifest) -> None:
    present = tree(model)
    if carrying := [site.path for site in present if site.policy is not None]:
        raise CheckpointError(
            f"Model already carries policies (at {carrying[0]!r}), so saved ones cannot be put on it",
            fix="Make the model anew and load into that",
        )
    differences = list(_differences(manifest.plan.tree, present))
    if differences:
        raise TreeMismatchError(
            f"Saved model in {str(source)!r} has other layers than the model given",
            differences=differences,
            fix="Make the model with the configuration it was saved with",
        )
    stored = dict(read_tensors(source, framework="torch", checksums=manifest.files))
    for alias, name in manifest.aliases.items():
        if name not in stored or alias in stored:
            raise CheckpointError(f"Saved model says that {alias!r} shares the tensor {name!r}, and the file does not")
        stored[alias] = stored[name]
    changes = _rebuild(model, manifest.plan, stored)
    _attach(model, manifest.plan, changes)
    scheme.commit(changes)
    expect_scaler(model, manifest.plan)


def _state(model: nn.Module) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise ModelError(
                f"State of the model holds {name!r}, which is not a tensor",
                got={"type": type(value).__name__},
                expected="tensors only: nothing else can be saved without running code on load",
                fix="Keep such state in a buffer",
            )
        if value.dtype.is_complex and value.dtype is not torch.complex64:
            raise ModelError(
                f"Tensor {name!r} has a dtype that safetensors files cannot hold",
                got={"dtype": str(value.dtype)},
                expected="complex64, or any dtype that is not complex",
                fix="Keep its real and imaginary parts as two tensors",
            )
        if value.is_meta:
            raise ModelError(
                f"Parameter {name!r} is on the meta device and has no values", fix="Load the weights first"
            )
        state[name] = value.detach()
    return state


def _unshare(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Splits a state into tensors that share no memory, on the CPU, and names of the same tensor."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    storages: set[int] = set()
    for name, tensor in state.items():
        # An empty tensor has no memory to share, and all empty tensors look alike.
        key = (
            tensor.untyped_storage()._cdata,
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
        )
        if tensor.numel() and key in first:
            aliases[name] = first[key]
            continue
        first[key] = name
        overlaps = tensor.untyped_storage()._cdata in storages
        storages.add(tensor.untyped_storage()._cdata)
        on_cpu = tensor.cpu()
        # A view of a larger or shared storage is written as the values it shows.
        whole = on_cpu.is_contiguous() and on_cpu.untyped_storage().nbytes() == on_cpu.nbytes
        tensors[name] = on_cpu if whole and not overlaps else on_cpu.clone(memory_format=torch.contiguous_format)
    return tensors, aliases


def _outcome(of: Plan) -> list[tuple[tuple[str, ...], Any]]:
    return [(row.site.paths, carries_out(row)) for row in of]


def _differences(saved: Tree, present: Tree) -> Iterator[str]:
    """Says, by path, where two trees are not of the same architecture. Dtypes and devices may differ."""
    old, new = ({path: site for site in of for path in site.paths} for of in (saved, present))
    for path in old:
        if path not in new:
            yield f"layer {path!r} is saved and not in the model"
    for path in new:
        if path not in old:
            yield f"layer {path!r} is in the model and not saved"
    for path, site in old.items():
        if path in new and path == site.path:
            yield from _site_differences(path, site, new[path])


def _site_differences(path: str, old: Site, new: Site) -> Iterator[str]:
    if old.paths != new.paths:
        yield f"layer {path!r} shares with {list(old.paths)} as saved, with {list(new.paths)} in the model"
        return
    if old.kinds != new.kinds:
        yield f"layer {path!r} is of kind {'/'.join(old.kinds)} as saved, {'/'.join(new.kinds)} in the model"
        return
    for saved, present in zip(old.members, new.members, strict=True):
        yield from _fact_differences(saved, present)
        shapes, others = ({p.name: p.shape for p in member.parameters} for member in (saved, present))
        for name in dict.fromkeys([*shapes, *others]):
            if shapes.get(name) != others.get(name):
                told = [str(of[name]) if name in of else "absent" for of in (shapes, others)]
                yield f"parameter {name!r} of {saved.paths[0]!r} is {told[0]} as saved, {told[1]} in the model"


def _fact_differences(saved: Member, present: Member) -> Iterator[str]:
    """Where two layers of PyTorch's own classes compute differently. Classes of others may move between files."""
    own = [member.class_name.startswith("torch.nn.") for member in (saved, present)]
    if not all(own):
        return
    if saved.class_name != present.class_name:
        names = [member.class_name.rpartition(".")[2] for member in (saved, present)]
        yield f"layer {saved.paths[0]!r} is of class {names[0]} as saved, {names[1]} in the model"
        return
    facts, others = (dict(member.details) for member in (saved, present))
    for name in dict.fromkeys([*facts, *others]):
        # What says how a module was made or trained, and not what it computes.
        if name not in {"dropout", "shares_memory", "refuses", "parametrized", "sparse", "scale_grad_by_freq"}:
            old, new = facts.get(name, "absent"), others.get(name, "absent")
            if old != new:
                yield f"{name} of layer {saved.paths[0]!r} is {old} as saved, {new} in the model"


def _rebuild(model: nn.Module, saved: Plan, stored: dict[str, Tensor]) -> list[Change]:
    """Builds every change of a load: schemes with their stored forms, then all other parameters and buffers."""
    modules = modules_by_path(model)
    changes: dict[nn.Module, Change] = {}
    carried: set[nn.Module] = set()
    remaining = dict(stored)
    below = _names_below(stored)
    for row in saved:
        policy = carries_out(row)
        if policy is None:
            continue
        shared: dict[Any, Any] = {}
        for member in row.site.members:
            module = working_module(modules[member.paths[0]])
            inner = state_prefix(modules[member.paths[0]])
            carried.add(module)
            carrier = scheme.find(policy, member.kind)
            if carrier is None:
                raise UnsupportedError(
                    f"Layer {member.paths[0]!r} was saved with {policy.name!r}, which this version cannot carry out",
                    fix="Load with the version that saved it, or upgrade",
                )
            prefix = _prefix(member.paths[0]) + inner
            local = {name[len(prefix) :]: remaining[name] for name in below.get(prefix, ()) if name in remaining}
            names = set(local)
            try:
                built = carrier.prepare(module, policy, stored=local, shared=shared)
            except NarrowcastError as error:
                raise CheckpointError(f"Layer {member.paths[0]!r} cannot be loaded: {error}") from error
            for path in member.paths:
                for name in names - set(local):
                    remaining.pop(_prefix(path) + inner + name, None)
            for change in built:
                # What `prepare` made from the module's own values is not wanted here: the file's values follow.
                change.new_data.clear()
                if change.module is module:
                    change.new_dict["_asked_policy"] = asked_of(row)
                changes[change.module] = change
    for change in fused.changes_for(model, carried, list(changes.values())):
        changes[change.module] = change
    _fill(model, modules, changes, remaining, set(stored))
    return list(changes.values())


def _names_below(names: Iterable[str]) -> dict[str, list[str]]:
    """The names under each prefix: `a.b.weight` is under `a.b.`, under `a.` and under the root's, which is empty."""
    below: dict[str, list[str]] = {}
    for name in names:
        prefix = ""
        for part in name.split(".")[:-1]:
            below.setdefault(prefix, []).append(name)
            prefix += part + "."
        below.setdefault(prefix, []).append(name)
    return below


def _fill(
    model: nn.Module,
    modules: dict[str, nn.Module],
    changes: dict[nn.Module, Change],
    remaining: dict[str, Tensor],
    stored: set[str],
) -> None:
    """Adds to `changes` what gives every parameter and saved buffer its tensor of the file."""
    missing: list[str] = []
    replaced: dict[int, nn.Parameter] = {}
    for path, module in modules.items():
        change = changes.get(module)
        namespace = change.new_dict if change is not None else module.__dict__
        unsaved = namespace["_non_persistent_buffers_set"]
        for group in ("_parameters", "_buffers"):
            for name, present in list(namespace[group].items()):
                full = _prefix(path) + name
                if present is None or name in unsaved:
                    if present is not None and present.is_meta:
                        missing.append(f"buffer {full!r} is not saved and has no values on the meta device")
                    continue
                value = remaining.pop(full, None)
                if value is None:
                    if full not in stored:
                        missing.append(f"tensor {full!r} is in the model and not in the file")
                    continue
                if value.shape != present.shape:
                    missing.append(
                        f"tensor {full!r} is {tuple(value.shape)} in the file, {tuple(present.shape)} in the model"
                    )
                    continue
                if change is None:
                    change = changes[module] = Change.of(module)
                    namespace = change.new_dict
                if not isinstance(present, nn.Parameter):
                    namespace[group][name] = value.to(_device(present))
                elif present.is_meta:
                    # A parameter without data cannot take any; ties stay ties.
                    fresh = replaced.setdefault(id(present), nn.Parameter(value, requires_grad=present.requires_grad))
                    namespace[group][name] = fresh
                elif id(present) not in replaced:
                    replaced[id(present)] = present
                    change.new_data.append((present, value.to(_device(present))))
    missing += [f"tensor {name!r} is in the file and not in the model" for name in remaining]
    if missing:
        raise TreeMismatchError(
            "Saved tensors are not those of the model given",
            differences=missing,
            fix="Make the model with the configuration it was saved with",
        )


def _device(tensor: Tensor) -> torch.device:
    return torch.device("cpu") if tensor.is_meta else tensor.device


def _prefix(path: str) -> str:
    return path.replace("/", ".") + "." if path else ""
