"""What policies do to the values of a model: the error at every layer, and of the outputs.

Two numbers for each layer that carries a policy. Its *own* error: both layers get the input that the reference model
has there. Its *accumulated* error: each layer gets the input of its own model, so that the errors of all layers before
are in it. A large own error names the layer to keep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from narrowcast.errors import ModelError
from narrowcast.frameworks import plan_of
from narrowcast.observe.latency import measure
from narrowcast.report.comparison import Comparison, LayerError, OutputError

__all__ = ["call", "check_origin", "compare", "each_batch", "floats_in"]


@dataclass
class _Sums:
    """Sums of squares, kept in float64, from which relative error and cosine follow."""

    difference: float = 0.0
    reference: float = 0.0
    other: float = 0.0
    product: float = 0.0
    largest: float = 0.0
    is_finite: bool = True
    num_calls: int = 0

    def add(self, reference: Any, other: Any, path: str) -> None:
        self.num_calls += 1
        ours, theirs = list(floats_in(other)), list(floats_in(reference))
        if [tuple(value.shape) for value in ours] != [tuple(value.shape) for value in theirs]:
            raise ModelError(
                f"Outputs of {path or 'the model'!r} have other shapes in the two models",
                got={"reference": [tuple(v.shape) for v in theirs], "other": [tuple(v.shape) for v in ours]},
                expected="two models of the same architecture",
                fix="Compare a model with what was saved from it",
            )
        for y, r in zip(ours, theirs, strict=True):
            y64, r64 = y.double(), r.double()
            self.is_finite = self.is_finite and bool(torch.isfinite(y64).all())
            difference = y64 - r64
            self.difference += float(difference.square().sum())
            self.reference += float(r64.square().sum())
            self.other += float(y64.square().sum())
            self.product += float((y64 * r64).sum())
            self.largest = max(self.largest, float(difference.abs().max()) if difference.numel() else 0.0)

    @property
    def relative(self) -> float:
        if self.difference == 0.0:
            return 0.0
        return math.sqrt(self.difference / self.reference) if self.reference else math.inf

    @property
    def cosine(self) -> float:
        norms = math.sqrt(self.reference) * math.sqrt(self.other)
        if norms:
            return self.product / norms
        return 1.0 if self.reference == self.other else 0.0


def check_origin(reference: nn.Module, other: nn.Module) -> None:
    """Makes sure that a model was made of `reference`: what policies leave as it is has the same values in both.

    Raises:
        ModelError: a tensor of one name, dtype and shape differs.
    """
    ours = other.state_dict()
    differing = [
        name
        for name, tensor in reference.state_dict().items()
        if isinstance(found := ours.get(name), Tensor)
        and found.dtype is tensor.dtype
        and found.shape == tensor.shape
        and not torch.allclose(found, tensor, rtol=0.0, atol=0.0, equal_nan=True)
    ]
    if differing:
        raise ModelError(
            "The saved model was made of a model with other weights",
            got={"tensors that differ": len(differing), "first": differing[0]},
            expected="tensors that no policy changes to be the same in both",
            fix="Compare with the very model that was saved; a callable that draws its weights has to set the seed",
        )


def compare(reference: nn.Module, other: nn.Module, batches: Iterable[Any], *, budget_s: float = 10.0) -> Comparison:
    """Runs two models of one architecture on the same batches and says how far apart they are.

    Args:
        reference: the model as it was.
        other: the model that carries policies (by `apply` or `load`).
        batches: inputs, each a tensor, a tuple of positional arguments or a mapping of keyword arguments.
        budget_s: the most seconds that measuring latency may take.

    Returns:
        The errors, bytes and latencies. Both models are left as they were, hooks removed, training flags restored.

    Raises:
        ModelError: no batch was given, or the models differ in what they return.

    Example:
        >>> import copy, narrowcast
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        >>> other = narrowcast.apply(copy.deepcopy(model), "int8")
        >>> found = compare(model, other, [torch.randn(8, 64)], budget_s=0.1)
        >>> [(layer.path, layer.own < 0.02) for layer in found.layers], found.outputs.cosine > 0.999
        ([('0', True)], True)
    """
    batches = list(batches)
    if not batches:
        raise ModelError("Nothing to compare on: no batch was given", fix="Return at least one batch from the callable")
    carrying = _carrying(other)
    own = {path: _Sums() for path in carrying}
    accumulated = {path: _Sums() for path in carrying}
    outputs = _Sums()
    modes = [(module, module.training) for model in (reference, other) for module in model.modules()]
    try:
        reference.eval()
        other.eval()
        with torch.inference_mode():
            for batch in batches:
                kept: dict[str, list[Any]] = {path: [] for path in carrying}
                with ExitStack() as hooks:
                    for path in carrying:
                        layer = _module(reference, path)
                        hook = _reference_hook(path, _module(other, path), own[path], kept[path])
                        hooks.callback(layer.register_forward_hook(hook, with_kwargs=True).remove)
                    expected = call(reference, batch)
                with ExitStack() as hooks:
                    for path in carrying:
                        hook = _other_hook(path, accumulated[path], iter(kept[path]))
                        hooks.callback(_module(other, path).register_forward_hook(hook).remove)
                    outputs.add(expected, call(other, batch), "")
            latency = measure(
                {"before": lambda: call(reference, batches[0]), "after": lambda: call(other, batches[0])},
                budget_s=budget_s,
            )
    finally:
        for module, training in modes:
            module.training = training
    return Comparison(
        layers=tuple(
            LayerError(
                path,
                policy,
                own[path].relative if own[path].num_calls else None,
                accumulated[path].relative if accumulated[path].num_calls else None,
                accumulated[path].num_calls,
            )
            for path, policy in carrying.items()
        ),
        outputs=OutputError(outputs.relative, outputs.cosine, outputs.largest, outputs.is_finite),
        bytes_before=_num_bytes(reference),
        bytes_after=_num_bytes(other),
        latency_before=latency["before"],
        latency_after=latency["after"],
        num_batches=len(batches),
    )


def call(model: nn.Module, batch: Any) -> Any:
    """Calls `model` with a batch: a mapping gives keyword arguments, a tuple positional ones, else one argument.

    Example:
        >>> call(nn.Identity(), (torch.ones(1),))
        tensor([1.])
    """
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def each_batch(value: Any) -> Iterator[Any]:
    """Yields the batches in what a user's callable returned: a list or an iterator has several, anything else is one.

    Example:
        >>> len(list(each_batch([torch.ones(1), torch.ones(2)]))), len(list(each_batch({"x": torch.ones(1)})))
        (2, 1)
    """
    if isinstance(value, Tensor | tuple | Mapping):
        yield value
    elif isinstance(value, Iterable):
        yield from value
    else:
        raise ModelError(
            "Inputs cannot be given to a model",
            got={"type": type(value).__name__},
            expected="a tensor, a tuple, a mapping, or a list of these",
            fix="Return one of these from the callable",
        )


def floats_in(value: Any) -> Iterator[Tensor]:
    """Yields the floating tensors in a model's output, however they are nested, in order.

    Example:
        >>> [value.dtype for value in floats_in({"a": (torch.ones(2), None), "b": torch.tensor(1)})]
        [torch.float32]
    """
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from floats_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from floats_in(item)


def _carrying(model: nn.Module) -> dict[str, str]:
    """The paths of the layers whose policy changes what they compute, with the policy's name."""
    plan = plan_of(model)
    if plan is None:
        return {}
    found = {}
    for row in plan:
        for member in row.site.members:
            module = _module(model, member.paths[0])
            policy = module.__dict__.get("_dtype_policy")
            if policy is not None and policy == row.given:
                found[member.paths[0]] = policy.name
    return found


def _module(model: nn.Module, path: str) -> nn.Module:
    return model.get_submodule(path.replace("/", "."))


Hook = Callable[..., None]


def _reference_hook(path: str, layer: nn.Module, sums: _Sums, kept: list[Any]) -> Hook:
    def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        kept.append([value.clone() for value in floats_in(output)])  # what follows may work in place
        sums.add(output, layer(*args, **kwargs), path)

    return hook


def _other_hook(path: str, sums: _Sums, kept: Iterator[Any]) -> Hook:
    def hook(_: nn.Module, __: Any, output: Any) -> None:
        expected = next(kept, None)
        if expected is not None:
            sums.add(expected, output, path)

    return hook


def _num_bytes(model: nn.Module) -> int:
    """The bytes of everything `state_dict` holds, a shared tensor once."""
    tensors = model.state_dict().values()
    seen = {
        (tensor.data_ptr(), tensor.shape, tensor.dtype): tensor.numel() * tensor.element_size() for tensor in tensors
    }
    return sum(seen.values())
