"""Equations of `EinsumDense`: what they say of shapes, and the way through a matrix multiplication.

The labels of an equation `input,kernel->output` are of three kinds: those of the batch (in input and output), those
that are summed over (in input and kernel) and those that come in (in kernel and output). With these alone it is a
matrix multiplication between two rearrangements.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from narrowcast.errors import LayerError

__all__ = ["Equation", "Shapes", "parse", "shapes_of"]

_FORM = re.compile(r"(\.\.\.)?([a-zA-Z]+)(\.\.\.)?,([a-zA-Z]+)->(\.\.\.)?([a-zA-Z]+)(\.\.\.)?")


@dataclass(frozen=True)
class Equation:
    """An equation for inputs of one rank.

    Args:
        input: the labels of the input, one for each axis, those for the ellipsis included.
        kernel: the labels of the kernel.
        output: the labels of the output.
        summed: the labels that are summed over, in the order of the kernel.
        new: the labels that come in, in the order of the output.
        is_linear: whether it is a matrix multiplication between two rearrangements.
        to_rows: the permutation of the input that puts the batch first and the summed axes last, or `None`.
        from_rows: the permutation from batch and new axes to the output, or `None`.
        num_batch: how many axes the batch has.
    """

    input: str
    kernel: str
    output: str
    summed: str
    new: str
    is_linear: bool
    to_rows: tuple[int, ...] | None
    from_rows: tuple[int, ...] | None
    num_batch: int

    @property
    def text(self) -> str:
        """The equation as `torch.einsum` takes it."""
        return f"{self.input},{self.kernel}->{self.output}"


@lru_cache(maxsize=1024)
def parse(equation: str, rank: int) -> Equation:
    """Reads an equation for inputs with `rank` axes.

    Args:
        equation: `ab,bc->ac`, `...ab,bc->...ac` or `ab...,bc->ac...`, in any letters.
        rank: how many axes the input has.

    Raises:
        LayerError: it has none of these forms, a label has no match, or the rank does not fit.

    Example:
        >>> parse("abc,cde->abde", 3).summed, parse("...x,xy->...y", 3).text
        ('c', 'abx,xy->aby')
    """
    form = _FORM.fullmatch(equation.replace(" ", "")) if isinstance(equation, str) else None
    if form is None or (form[1], form[3]) != (form[5], form[7]) or (form[1] and form[3]):
        raise LayerError(
            "Equation of EinsumDense is not one it can compute",
            got={"equation": equation},
            expected="the form 'ab,bc->ac', '...ab,bc->...ac' or 'ab...,bc->ac...'",
        )
    given, kernel, output = form[2], form[4], form[6]
    num_elided = rank - len(given)
    if num_elided < 0 or (num_elided > 0 and not (form[1] or form[3])):
        raise LayerError(
            "Input of EinsumDense does not have the axes that its equation names",
            got={"equation": equation, "rank": rank},
            expected=f"{len(given)} axes" + (" or more" if form[1] or form[3] else ""),
        )
    free = [letter for letter in string.ascii_letters if letter not in given + kernel + output][:num_elided]
    elided = "".join(free)
    given = elided + given if form[1] else given + elided
    output = elided + output if form[1] else output + elided
    for label in output:
        if label not in given + kernel:
            raise _unmatched(equation, label, "output", "the input or the kernel")
    for label in kernel:
        if label not in given + output:
            raise _unmatched(equation, label, "kernel", "the input or the output")
    batch = "".join(label for label in given if label in output and label not in kernel)
    summed = "".join(label for label in kernel if label in given and label not in output)
    new = "".join(label for label in output if label in kernel and label not in given)
    is_linear = (
        bool(summed and new)
        and len(batch + summed) == len(given) == len(set(given))
        and len(summed + new) == len(kernel) == len(set(kernel))
        and len(batch + new) == len(output)
    )
    to_rows = tuple(given.index(label) for label in batch + summed) if is_linear else ()
    from_rows = tuple((batch + new).index(label) for label in output) if is_linear else ()
    return Equation(
        given,
        kernel,
        output,
        summed,
        new,
        is_linear,
        None if to_rows == tuple(range(len(to_rows))) else to_rows,
        None if from_rows == tuple(range(len(from_rows))) else from_rows,
        len(batch),
    )


def _unmatched(equation: str, label: str, where: str, others: str) -> LayerError:
    return LayerError(
        f"Label {label!r} in the {where} of an equation has no match",
        got={"equation": equation},
        expected=f"a label of {others}",
    )


@dataclass(frozen=True)
class Shapes:
    """What an equation and two shapes say of the variables.

    Args:
        kernel: the shape of the kernel.
        bias: the shape of the bias in Keras' layout, or `None`.
        output: the shape of the output, `None` for open lengths.
        input_axes: the axes of the kernel that count as inputs.
        output_axes: those that count as outputs.
        has_plain_bias: whether the bias has all axes that come in and no other.
    """

    kernel: tuple[int, ...]
    bias: tuple[int, ...] | None
    output: tuple[Any, ...]
    input_axes: tuple[int, ...]
    output_axes: tuple[int, ...]
    has_plain_bias: bool


def shapes_of(equation: str, bias_axes: str | None, input_shape: Sequence[Any], output_shape: Sequence[Any]) -> Shapes:
    """Returns the shapes of kernel, bias and output.

    Args:
        equation: see `parse`.
        bias_axes: the labels of the output that the bias has; `None` for no bias.
        input_shape: with the batch, `None` for open lengths.
        output_shape: without the batch and the axes of an ellipsis, `None` for lengths that the input says.

    Raises:
        LayerError: the shapes contradict each other or the equation, or leave a length of the kernel open.
    """
    parsed = parse(equation, len(input_shape))
    num_elided = len(parsed.input) - len(equation.partition(",")[0].replace("...", "").strip())
    wanted: list[Any] = list(output_shape)
    if equation.strip().startswith("..."):
        wanted = [*input_shape[:num_elided], *wanted]
    else:
        wanted = [input_shape[0], *wanted, *(input_shape[len(input_shape) - num_elided :] if num_elided else ())]
    if len(wanted) != len(parsed.output):
        raise LayerError(
            "Output shape of EinsumDense does not fit its equation",
            got={"output_shape": tuple(output_shape), "equation": equation},
            expected=f"a length, or None, for each axis of the output {parsed.output!r} but the first",
        )
    lengths: dict[str, Any] = dict(zip(parsed.input, input_shape, strict=True))
    for label, length in zip(parsed.output, wanted, strict=True):
        known = lengths.get(label)
        if label in parsed.input and None not in (known, length) and known != length:
            raise LayerError(
                f"Input and output of EinsumDense have different lengths at their common axis {label!r}",
                got={"input_shape": tuple(input_shape), "output_shape": tuple(output_shape)},
                expected="the same length, or None in the output",
            )
        lengths[label] = length if known is None else known
    if open_labels := [label for label in parsed.kernel if lengths[label] is None]:
        raise LayerError(
            f"Length of axis {open_labels[0]!r} of the kernel of EinsumDense is open",
            got={"input_shape": tuple(input_shape), "output_shape": tuple(output_shape), "equation": equation},
            expected="a known length",
        )
    axes = range(len(parsed.kernel))
    return Shapes(
        tuple(lengths[label] for label in parsed.kernel),
        None if bias_axes is None else _bias_shape(parsed, bias_axes, lengths),
        tuple(lengths[label] for label in parsed.output),
        tuple(axis for axis in axes if parsed.kernel[axis] not in parsed.output),
        tuple(axis for axis in axes if parsed.kernel[axis] in parsed.output),
        bias_axes is not None and set(bias_axes) == set(parsed.new),
    )


def _bias_shape(parsed: Equation, bias_axes: str, lengths: dict[str, Any]) -> tuple[int, ...]:
    for label in bias_axes:
        if label not in parsed.output or lengths[label] is None:
            raise LayerError(
                f"Bias of EinsumDense cannot have the axis {label!r}",
                got={"bias_axes": bias_axes},
                expected=f"axes of the output {parsed.output!r} whose length is known",
            )
    first = min(parsed.output.index(label) for label in bias_axes)
    return tuple(lengths[label] if label in bias_axes else 1 for label in parsed.output[first:])
