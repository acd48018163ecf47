"""The verbs of the library, for a model of any framework.

Each framework package (`narrowcast.torch`) has the same verbs; here the one that the model belongs to is found. A
framework is imported only because the user's own object is of it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from narrowcast.errors import CheckpointError, ModelError

if TYPE_CHECKING:
    from narrowcast.plan.plan import Plan
    from narrowcast.plan.tree import Tree

__all__ = ["apply", "dequantize", "load", "plan", "plan_of", "save", "tree"]

Model = TypeVar("Model")

_PACKAGES = {"torch": ("nn.Module", "narrowcast.torch")}
"""By framework: the base class of its models, and the package here that carries policies out on them."""


def _package_of(model: object) -> Any:
    for framework, (base, package) in _PACKAGES.items():
        # Whoever holds a model has imported its framework.
        if framework in sys.modules and isinstance(model, attrgetter(base)(sys.modules[framework])):
            return importlib.import_module(package)
    raise ModelError(
        "Model is of no framework that narrowcast carries out",
        got={"type": f"{type(model).__module__}.{type(model).__qualname__}"},
        expected="a torch.nn.Module",
        fix="Give the model object itself",
    )


def _inner(model: Any) -> Any:
    """The model that `torch.compile` wrapped, else the model itself: paths are those of the model as it was written."""
    kind = type(model)
    is_wrapper = kind.__name__ == "OptimizedModule" and kind.__module__.startswith("torch.")
    return model._orig_mod if is_wrapper else model


def _package_for(folder: Path) -> Any:
    from narrowcast.checkpoint import Manifest  # only here: it needs the packages of policies and plans

    framework = Manifest.read(folder).framework
    if framework not in _PACKAGES:
        raise CheckpointError(
            f"Saved model in {str(folder)!r} is of a framework that narrowcast does not load by itself",
            got={"framework": framework},
            expected=f"one of {', '.join(_PACKAGES)}",
        )
    return importlib.import_module(_PACKAGES[framework][1])


def tree(model: object) -> Tree:
    """Reads a model into its tree of sites, touching no tensor.

    Example:
        >>> import torch
        >>> [site.path for site in tree(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))]
        ['', '0', '1']
    """
    result: Tree = _package_of(model).tree(_inner(model))
    return result


def plan(model: object, policy: Any, *, strict: bool = True, fallback: str = "source") -> Plan:
    """Says what a policy, a map or a policy's name will do to a model, touching no tensor.

    Args:
        model: a model, on the meta device too.
        policy: a `DTypePolicyMap`, or one policy (or its name) for every site that can carry it.
        strict: whether findings are errors, or warnings kept in the plan.
        fallback: `"source"`, or `"error"` to refuse sites that would fall back.

    Raises:
        PlanError: overlaps, rules that match nothing or can do nothing; all findings at once.

    Example:
        >>> import torch
        >>> plan(torch.nn.Sequential(torch.nn.Linear(64, 64)), {"0": "int8"})["0"].status.value
        'applied'
    """
    result: Plan = _package_of(model).plan(_inner(model), policy, strict=strict, fallback=fallback)
    return result


def apply(
    model: Model, policy: Any, batches: Iterable[Any] | None = None, *, strict: bool = True, fallback: str = "source"
) -> Model:
    """Changes a model in place to what a policy, a map or a plan says, and returns it: all of it or nothing.

    Args:
        model: the model.
        policy: a `Plan` made for this model, or whatever `plan` takes.
        batches: inputs for modes that calibrate.
        strict: as in `plan`.
        fallback: as in `plan`.

    Raises:
        PlanError: as in `plan`.
        UnsupportedError: a mode is not carried out in this framework yet.
        WeightError: a weight holds NaN or infinity.

    Example:
        >>> import torch
        >>> model = apply(torch.nn.Sequential(torch.nn.Linear(64, 64)), {"0": "int8"})
        >>> model[0].weight_codes.dtype
        torch.int8
    """
    _package_of(model).apply(_inner(model), policy, batches, strict=strict, fallback=fallback)
    return model


def dequantize(model: Model) -> Model:
    """Takes every quantized site of a model back to the policy it started from, in place, and returns it.

    Example:
        >>> import torch
        >>> dequantize(apply(torch.nn.Sequential(torch.nn.Linear(64, 64)), "int8"))[0].weight.dtype
        torch.float32
    """
    _package_of(model).dequantize(_inner(model))
    return model


def plan_of(model: object) -> Plan | None:
    """Returns the plan that was carried out on a model, or `None`.

    Example:
        >>> import torch
        >>> plan_of(apply(torch.nn.Linear(64, 64), "int8"))[""].given.name
        'int8_from_float32'
    """
    result: Plan | None = _package_of(model).plan_of(_inner(model))
    return result


def save(model: object, folder: str | Path, **options: Any) -> None:
    """Writes a model's tensors and policies to a folder, all or nothing; of a model of layers, the architecture too.

    Args:
        model: the model, carrying policies or not.
        folder: made if missing. Other files in it stay.
        options: on PyTorch `max_shard_bytes`, above which the tensors are split into several files.

    Raises:
        CheckpointError: the files cannot be written; what the folder held before is unchanged.

    Example:
        >>> import tempfile, torch
        >>> save(apply(torch.nn.Linear(64, 64), "int8"), tempfile.mkdtemp())
    """
    _package_of(model).save(_inner(model), folder, **options)


@overload
def load(model: str | Path, *, custom_objects: Mapping[str, Any] | None = None) -> Any: ...


@overload
def load(model: Model, folder: str | Path) -> Model: ...


def load(model: Any, folder: str | Path | None = None, *, custom_objects: Mapping[str, Any] | None = None) -> Any:
    """Gives a fresh model the policies and tensors of a saved folder, in place, and returns it.

    Args:
        model: a model of the architecture that was saved; or, in place of both arguments, the folder of a model made of
            layers of `narrowcast.layers`, which is then made from the folder alone, in eval mode.
        folder: what `save` wrote.
        custom_objects: without a model, classes and functions by name that are not registered.

    Raises:
        CheckpointError: the folder cannot be read. The model is unchanged.
        TreeMismatchError: the layers are not those that were saved. The model is unchanged.

    Example:
        >>> import tempfile, torch
        >>> folder = tempfile.mkdtemp()
        >>> save(apply(torch.nn.Linear(64, 64), "int8"), folder)
        >>> load(torch.nn.Linear(64, 64), folder).dtype_policy.name
        'int8_from_float32'
    """
    if folder is None:
        if not isinstance(model, str | Path):
            raise ModelError(
                "Folder is not given",
                got={"model": type(model).__name__},
                expected="`load(model, folder)` or `load(folder)`",
            )
        package, made, folder = _package_for(Path(model)), None, model
    else:
        package, made = _package_of(model), _inner(model)
    loaded = package.load(made, folder, custom_objects=custom_objects)
    return loaded if made is None else model
