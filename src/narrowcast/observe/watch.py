"""Watches a model run: hooks on every site that carries a policy, statistics of a step now and then.

Nothing of the graph is kept: what hooks see becomes a row of numbers at once.
"""

from __future__ import annotations

import math
import sys
import time
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from narrowcast.dtype_policies import DTypePolicy, dtypes, keep
from narrowcast.errors import ModelError, PolicyError, PolicyTypeError, UnsupportedError
from narrowcast.observe.ledger import Ledger, Subject
from narrowcast.observe.narrowing import Forms, forms_of
from narrowcast.observe.reading import (
    first_floating,
    in_float32,
    is_inside_backward,
    is_lossy,
    is_transposed,
    sites,
    weights,
    without_autocast,
)
from narrowcast.observe.records import TENSORS, Point, Summary
from narrowcast.observe.statistics import Narrow, compare, measure
from narrowcast.plan.tree import Member

__all__ = ["ScalarWriter", "Watch"]

_NOT_COMPILED = "hooks, by which `observe` sees, are no part of what is compiled"


class ScalarWriter(Protocol):
    """What scalars are written to: TensorBoard's `SummaryWriter`, or anything with its `add_scalar`."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Takes one number of one step."""
        ...


class Watch:
    """What `narrowcast.observe` returns: a context that records while it is open, and says what it found.

    Args:
        model: the model. It is not changed, but for hooks that are gone when the context ends.
        every: records every so many steps; `None` records as often as `overhead` allows.
        overhead: the most time that recording may take, as a share of the steps' own time.
        max_elements: how many elements of each tensor are looked at for shares, errors and histograms.
        num_points: how many points of each tensor's history are kept, at least; at most twice as many.
        writer: gets amax, underflow, saturation, signal-to-noise ratio and scale of every recorded step.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int | None,
        overhead: float,
        max_elements: int,
        num_points: int,
        writer: ScalarWriter | None,
    ) -> None:
        _check(model, every=every, overhead=overhead, max_elements=max_elements, num_points=num_points, writer=writer)
        self._model: nn.Module | None = model
        self._name = type(model).__name__
        self._every = every
        self._overhead = overhead
        self._max_elements = max_elements
        self._writer = writer
        self._ledger = Ledger(num_points)
        self._hooks: list[Any] = []
        self._is_training = model.training
        self._places: dict[str, int] = {}
        self._parameters: set[int] = set()
        self._step = 0
        self._is_recording = True
        self._is_advance_due = False
        self._began: float | None = None
        self._spent = self._spent_before = 0.0
        self._elapsed = 0.0
        self._rows: list[tuple[Subject, Tensor]] = []
        self._weights_seen: set[int] = set()
        self._stored_seen: set[int] = set()
        self._on_entry, self._on_call, self._on_pass = self._see_entry, self._see_call, self._see_pass

    # The context.

    def __enter__(self) -> Watch:
        model = self._model
        if model is None or self._hooks:
            raise ModelError(
                "This observation was made already", fix="Call `narrowcast.observe(model)` again for another one"
            )
        _refuse_compiled(model)
        if "torch._dynamo" in sys.modules:
            # Where the model is called from compiled code, the graph ends at each hook and the hook runs eagerly.
            self._on_entry, self._on_call, self._on_pass = (
                torch.compiler.disable(seen, reason=_NOT_COMPILED)  # type: ignore[no-untyped-call]
                for seen in (self._see_entry, self._see_call, self._see_pass)
            )
        self._parameters = {id(parameter) for parameter in model.parameters()}
        try:
            for module, member in sites(model):
                hook = _Hook(self, member)
                self._places[hook.path] = len(self._places)
                self._hooks.append(module.register_forward_hook(hook, with_kwargs=True))
            if not self._hooks:
                raise ModelError(
                    f"{self._name} has no layer that carries a policy, so nothing is rounded that could be observed",
                    fix="Call `narrowcast.apply(model, policy)` first",
                )
            self._hooks.append(model.register_forward_pre_hook(_Beginning(self)))
            self._hooks.append(model.register_forward_hook(_Ending(self)))
            self._hooks.append(register_optimizer_step_post_hook(_StepHook(self)))
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()
        self._model = None
        if self._began is not None:
            self._advance()

    def _remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    # Steps.

    def _touch(self) -> None:
        """Notes that a step is going on; a step that an optimizer ended in the middle of backward is closed first."""
        if self._is_advance_due and not is_inside_backward():
            self._advance()
        if self._began is None:
            self._began = time.perf_counter()
            self._spent_before = self._spent

    def _end_step(self) -> None:
        if self._began is None:
            return  # another optimizer of the same step
        if is_inside_backward():
            self._is_advance_due = True  # an optimizer that steps for each parameter as its gradient arrives
        else:
            self._advance()

    def _advance(self) -> None:
        entered = time.perf_counter()
        if self._began is not None:
            self._elapsed += entered - self._began - (self._spent - self._spent_before)
        self._began, self._is_advance_due = None, False
        if self._is_recording and self._rows:
            rows = _to_arrays(self._rows)
            points = self._ledger.add(self._step, rows)
            if self._writer is not None:
                for subject, point in points.items():
                    _write(self._writer, subject, point)
        self._rows = []
        self._weights_seen.clear()
        self._spent += time.perf_counter() - entered
        self._step += 1
        if self._every is not None:
            self._is_recording = self._step % self._every == 0
        else:
            self._is_recording = self._spent <= self._overhead * self._elapsed

    # What hooks see.

    def _wants(self, model: nn.Module | None) -> bool:
        return model is not None and model.training is self._is_training

    def _see_entry(self, model: nn.Module) -> None:
        if self._wants(model):
            self._touch()

    def _see_pass(self, model: nn.Module) -> None:
        # In eval mode no optimizer follows: every pass is a step.
        if not self._is_training and self._wants(model):
            self._end_step()

    def _see_call(self, hook: _Hook, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            raise _compiled("A layer")
        if not self._wants(self._model):
            return
        self._touch()
        if not self._is_recording:
            return
        entered = time.perf_counter()
        result = first_floating(output)
        with torch.no_grad(), without_autocast(result):
            forms = forms_of(module, hook.kind, hook.policy)
            # Checkpointing runs a layer again inside backward; what flowed was seen the first time.
            if not is_inside_backward():
                given = first_floating((args, kwargs))
                if hook.has_parameters:
                    self._see(hook, "input", given, forms.input)
                    self._seeweights(hook, module, forms)
                    expected = in_float32(hook.member, module, forms, given, result)
                    self._see(hook, "output", result, None, expected)
                elif given is not None and is_lossy(given, forms.input):
                    self._see(hook, "input", given, forms.input)
        if hook.has_parameters and result is not None and result.requires_grad:
            result.register_hook(  # type: ignore[no-untyped-call]
                _GradientHook(self, hook, forms.gradient, self._step)
            )
        self._spent += time.perf_counter() - entered

    def _see_gradient(self, hook: _Hook, gradient: Tensor, narrow: Narrow | None, step: int) -> None:
        if step != self._step or not self._is_recording or not self._hooks:
            return  # a graph that is older than this step, or that outlived the observation
        entered = time.perf_counter()
        with torch.no_grad(), without_autocast(gradient):
            self._see(hook, "gradient", gradient, narrow)
        self._spent += time.perf_counter() - entered

    def _seeweights(self, hook: _Hook, module: nn.Module, forms: Forms) -> None:
        if id(module) in self._weights_seen:
            return  # used before in this step
        self._weights_seen.add(id(module))
        if forms.stored_weight is None:
            for weight in weights(module):
                self._see(hook, "weight", weight.t() if hook.is_transposed else weight, forms.weight)
        elif id(module) not in self._stored_seen:
            self._stored_seen.add(id(module))
            stored = getattr(module, "weight", None)  # of a quantized layer: what its codes stand for
            if isinstance(stored, Tensor):
                self._see(hook, "weight", stored, None, dtype=forms.stored_weight)

    def _see(
        self,
        hook: _Hook,
        tensor: str,
        x: Tensor | None,
        narrow: Narrow | None,
        expected: tuple[Tensor, Tensor] | None = None,
        dtype: str | None = None,
    ) -> None:
        if x is None:
            return
        if hasattr(x, "to_local"):  # a shard of a distributed tensor
            x = x.to_local()
        own = dtypes.standardize(x.dtype)
        if narrow is not None and narrow.dtype == own:
            narrow = None  # rounded before it came here: what was lost cannot be seen
        subject = Subject(
            hook.path,
            hook.kind,
            hook.policy.name,
            tensor,
            dtype or (narrow.dtype if narrow is not None else own),
            is_rounded=narrow is not None,
            is_compared=expected is not None,
        )
        row = measure(x, narrow, max_elements=self._max_elements, offset=self._step * 2_654_435_761 % 2**32)
        if expected is not None:
            row = compare(row, *expected)
        self._rows.append((subject, row))

    # What was found.

    def summary(self) -> Summary:
        """Returns what was found so far: all steps that ended, and the last one too once the context has ended.

        Raises:
            ModelError: the context has ended and nothing was recorded.
        """
        observations = self._ledger.observations()
        if not observations and self._model is None:
            mode = "training" if self._is_training else "eval"
            raise ModelError(
                f"No pass of {self._name} in {mode} mode was seen, so there is nothing to sum up",
                expected=f"calls of the model in {mode} mode, in which it was when `observe` began, not compiled",
                fix="Run batches inside the context, and observe before compiling",
            )
        return Summary(
            model=self._name,
            num_steps=self._step,
            num_recorded=self._ledger.num_recorded,
            overhead=self._spent / self._elapsed if self._elapsed else 0.0,
            observations=tuple(
                sorted(observations, key=lambda one: (self._places[one.path], TENSORS.index(one.tensor)))
            ),
        )


class _Passing:
    """A hook that does not follow its module: a copied or unpickled module has one that does nothing."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _do_nothing

    def __reduce__(self) -> Any:
        return _nothing, ()


def _nothing() -> Any:
    return _do_nothing


def _do_nothing(*_: Any, **__: Any) -> None:
    """What a copy's hooks do."""


class _Hook(_Passing):
    __slots__ = ("_watch", "has_parameters", "is_transposed", "kind", "member", "path", "policy")

    def __init__(self, watch: Watch, member: Member) -> None:
        self._watch = watch
        self.path = member.paths[0]
        self.kind = member.kind
        self.policy: DTypePolicy = member.policy or keep
        # Of a layer without parameters only what it rounds of its input is of interest: the rest is its children's.
        self.has_parameters = bool(member.parameters)
        self.member = member
        self.is_transposed = is_transposed(member)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._watch._on_call(self, module, args, kwargs, output)


class _RootHook(_Passing):
    __slots__ = ("_watch",)

    def __init__(self, watch: Watch) -> None:
        self._watch = watch


class _Beginning(_RootHook):
    __slots__ = ()

    def __call__(self, module: nn.Module, args: Any) -> None:
        self._watch._on_entry(module)


class _Ending(_RootHook):
    __slots__ = ()

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._watch._on_pass(module)


class _StepHook:
    """Ends a step when an optimizer of the model's parameters has stepped."""

    __slots__ = ("_known", "_watch")

    def __init__(self, watch: Watch) -> None:
        self._watch = weakref.ref(watch)
        self._known: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        watch = self._watch()
        if watch is None or not watch._is_training:
            return
        if optimizer not in self._known:
            held = (parameter for group in optimizer.param_groups for parameter in group["params"])
            self._known[optimizer] = any(id(parameter) in watch._parameters for parameter in held)
        if self._known[optimizer]:
            watch._end_step()


class _GradientHook:
    __slots__ = ("_hook", "_narrow", "_step", "_watch")

    def __init__(self, watch: Watch, hook: _Hook, narrow: Narrow | None, step: int) -> None:
        self._watch = watch
        self._hook = hook
        self._narrow = narrow
        self._step = step

    def __call__(self, gradient: Tensor) -> None:
        self._watch._see_gradient(self._hook, gradient, self._narrow, self._step)


def _to_arrays(rows: list[tuple[Subject, Tensor]]) -> list[tuple[Subject, Any]]:
    """The rows as float64 arrays: one transfer where all lie on one device."""
    tensors = [row for _, row in rows]
    if len({row.device for row in tensors}) > 1:
        tensors = [row.cpu() for row in tensors]
    table = torch.stack(tensors).cpu().double().numpy()
    return [(subject, row) for (subject, _), row in zip(rows, table, strict=True)]


def _write(writer: ScalarWriter, subject: Subject, point: Point) -> None:
    for name in ("amax", "underflow", "saturation", "sqnr_db", "scale"):
        value = getattr(point, name)
        if value is not None and math.isfinite(value):
            tag = "/".join(filter(None, ("narrowcast", subject.path, subject.tensor, name)))
            writer.add_scalar(tag, value, point.step)


# Checks.


def _check(model: Any, *, every: Any, overhead: Any, max_elements: Any, num_points: Any, writer: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ModelError(
            "Model cannot be observed",
            got={"type": f"{type(model).__module__}.{type(model).__qualname__}"},
            expected="a torch.nn.Module",
        )
    for name, value in {"every": every, "max_elements": max_elements, "num_points": num_points}.items():
        if name == "every" and value is None:
            continue
        if type(value) is not int or value < 1:
            raise PolicyError(
                f"Argument {name!r} of observe is not usable", got={name: value}, expected="an integer of at least 1"
            )
    if isinstance(overhead, bool) or not isinstance(overhead, int | float) or not overhead > 0:
        raise PolicyError(
            "Argument 'overhead' of observe is not usable",
            got={"overhead": overhead},
            expected="a share of the steps' time above 0, such as 0.1",
        )
    if writer is not None and not callable(getattr(writer, "add_scalar", None)):
        raise PolicyTypeError(
            "Writer cannot take scalars",
            got={"writer": writer},
            expected="an object with add_scalar(tag, value, step), such as TensorBoard's SummaryWriter",
        )


def _refuse_compiled(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise _compiled(f"Layer {name!r}" if name else "The model")


def _compiled(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what} is compiled, and {_NOT_COMPILED}",
        expected="a model that runs eagerly",
        fix="Observe some steps before `torch.compile`, or run under `torch.compiler.set_stance('force_eager')`",
    )
