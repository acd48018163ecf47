"""One module of every kind with an input, its reference in float64, and a way to put a float policy on it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from narrowcast.dtype_policies import get
from narrowcast.torch import apply, scheme
from narrowcast.torch.kinds import kind_of, owned_children

POLICIES = ("float32", "bfloat16", "float16", "float64", "mixed_bfloat16", "mixed_float16")
UNIT = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""The largest relative error of one rounding."""


def randn(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Custom(nn.Module):
    """Parameters of its own, in a list and a dict too."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(randn(6, 4, seed=1))
        self.rows = nn.ParameterList([nn.Parameter(randn(4, seed=2)), nn.Parameter(randn(4, seed=3))])
        self.named = nn.ParameterDict({"shift": nn.Parameter(randn(4, seed=4))})

    def forward(self, x):
        return (x @ self.matrix) * self.rows[0] + self.rows[1] + self.named["shift"]


@dataclass(frozen=True)
class Case:
    """A kind of module.

    Args:
        make: makes the module.
        inputs: makes its arguments.
        roundings: how many roundings to the compute dtype lie between exact arithmetic and the output, in units of the
            largest output: one for a layer that multiplies once, some for a layer of several steps.
        rounds_operands: whether inputs and parameters are rounded to the compute dtype first.
        out: the dtype of what it returns: the compute dtype, or None for float32 at least.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    roundings: int = 1
    rounds_operands: bool = True
    returns_wide: bool = False


def packed() -> nn.utils.rnn.PackedSequence:
    return nn.utils.rnn.pack_padded_sequence(randn(5, 3, 6), torch.tensor([5, 3, 2]))


IDS = torch.tensor([[1, 5, 2], [10, 0, 1]])
CLASSES = torch.tensor([0, 3, 1, 2, 5])
CASES = {
    "linear": Case(lambda: nn.Linear(6, 4), lambda: (randn(5, 6),)),
    "linear without bias": Case(lambda: nn.Linear(6, 4, bias=False), lambda: (randn(2, 3, 6),)),
    "linear of one row": Case(lambda: nn.Linear(7, 1), lambda: (randn(7),)),
    "conv1d": Case(lambda: nn.Conv1d(4, 6, 3, padding="same"), lambda: (randn(2, 4, 9),)),
    "conv2d": Case(
        lambda: nn.Conv2d(4, 6, 3, groups=2, padding_mode="reflect", padding=1), lambda: (randn(2, 4, 5, 5),)
    ),
    "conv3d": Case(lambda: nn.Conv3d(2, 3, 2, bias=False), lambda: (randn(2, 2, 4, 4, 4),)),
    "transposed conv1d": Case(lambda: nn.ConvTranspose1d(4, 6, 3, stride=2), lambda: (randn(2, 4, 5), [12])),
    "transposed conv2d": Case(lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), lambda: (randn(2, 4, 5, 5),)),
    "embedding": Case(lambda: nn.Embedding(11, 6, padding_idx=0), lambda: (IDS,)),
    "embedding bag": Case(lambda: nn.EmbeddingBag(11, 6, mode="mean"), lambda: (IDS,)),
    # The table is not rounded before it is summed, the weights of the samples only to its dtype.
    "weighted bag": Case(lambda: nn.EmbeddingBag(11, 6, mode="sum"), lambda: (IDS, None, randn(2, 3)), 3),
    "layer norm": Case(lambda: nn.LayerNorm(6), lambda: (randn(5, 6),), rounds_operands=False),
    "rms norm": Case(lambda: nn.RMSNorm(6), lambda: (randn(5, 6),), rounds_operands=False),
    "group norm": Case(lambda: nn.GroupNorm(2, 6), lambda: (randn(5, 6, 4),), rounds_operands=False),
    "batch norm": Case(lambda: nn.BatchNorm1d(6), lambda: (randn(5, 6),), rounds_operands=False),
    "instance norm": Case(
        lambda: nn.InstanceNorm2d(6, affine=True, track_running_stats=True),
        lambda: (randn(2, 6, 4, 4),),
        rounds_operands=False,
    ),
    "local response norm": Case(lambda: nn.LocalResponseNorm(2), lambda: (randn(2, 6, 4),), rounds_operands=False),
    "softmax": Case(lambda: nn.Softmax(-1), lambda: (randn(5, 6),), rounds_operands=False),
    "log softmax": Case(lambda: nn.LogSoftmax(-1), lambda: (randn(5, 6),), rounds_operands=False),
    "cross entropy": Case(
        lambda: nn.CrossEntropyLoss(weight=torch.linspace(0.5, 1.5, 6)),
        lambda: (randn(5, 6), CLASSES),
        rounds_operands=False,
        returns_wide=True,
    ),
    "mean squared error": Case(
        nn.MSELoss, lambda: (randn(5, 6), randn(5, 6, seed=4)), rounds_operands=False, returns_wide=True
    ),
    # Projections, scores, softmax, weighted sum, output projection.
    "attention": Case(lambda: nn.MultiheadAttention(8, 2, batch_first=True), lambda: (randn(2, 5, 8),) * 3, 6),
    "attention of three widths": Case(
        lambda: nn.MultiheadAttention(8, 2, kdim=6, vdim=4, add_bias_kv=True),
        lambda: (randn(5, 2, 8), randn(7, 2, 6, seed=4), randn(7, 2, 4, seed=5)),
        6,
    ),
    # Four gates a step, each rounded, over five steps and two layers.
    "lstm": Case(lambda: nn.LSTM(6, 4, 2, bidirectional=True), lambda: (randn(5, 3, 6),), 20),
    "lstm with projection": Case(lambda: nn.LSTM(6, 4, proj_size=2, batch_first=True), lambda: (randn(3, 5, 6),), 20),
    "gru of packed input": Case(lambda: nn.GRU(6, 4), lambda: (packed(),), 20),
    "rnn with a state": Case(lambda: nn.RNN(6, 4), lambda: (randn(5, 3, 6), randn(1, 3, 4)), 20),
    "lstm cell": Case(lambda: nn.LSTMCell(6, 4), lambda: (randn(3, 6),), 6),
    "gru cell": Case(lambda: nn.GRUCell(6, 4), lambda: (randn(3, 6), randn(3, 4)), 6),
    "bilinear": Case(lambda: nn.Bilinear(3, 4, 5), lambda: (randn(6, 3), randn(6, 4)), 4),
    "prelu": Case(lambda: nn.PReLU(6), lambda: (randn(5, 6),), 1),
    # A product, a scaling and two sums.
    "custom": Case(Custom, lambda: (randn(5, 6),), 5),
}


def kind(module: nn.Module) -> str:
    return kind_of(module, has_parameters=any(True for _ in _own(module)))


def _own(module: nn.Module):
    yield from module._parameters.values()
    for name in owned_children(module):
        yield from module._modules[name].parameters()


def put(module: nn.Module, policy: str) -> nn.Module:
    """Puts a float policy, or `keep`, on one module, as `apply` does for each of a plan."""
    value = get(policy)
    scheme.commit(scheme.find(value, kind(module)).prepare(module, value))
    return module


def put_on_all(model: nn.Module, policy: str) -> nn.Module:
    """Puts a float policy on every site of a model, through a plan."""
    return apply(model, policy)


def dtypes_of(policy: str) -> tuple[torch.dtype, torch.dtype]:
    value = get(policy)
    return getattr(torch, value.compute_dtype), getattr(torch, value.variable_dtype)


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return CASES[name].make()


def reference(module: nn.Module, inputs: tuple[Any, ...], case: Case, policy: str) -> tuple[nn.Module, Any]:
    """A copy of a plain module in float64 and its inputs, holding the values that the policy rounds them to."""
    compute, variable = dtypes_of(policy)
    exact = copy.deepcopy(module)
    for parameter in exact.parameters():
        rounded = parameter.data.to(variable)
        parameter.data = rounded.to(compute).double() if case.rounds_operands else rounded.double()
    for child in exact.modules():
        for buffer_name, buffer in child._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                child._buffers[buffer_name] = buffer.double()
    return exact, map_floats(lambda x: (x.to(compute) if case.rounds_operands else x).double(), inputs)


def map_floats(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return function(tree) if tree.is_floating_point() else tree
    if isinstance(tree, nn.utils.rnn.PackedSequence):
        return tree._replace(data=function(tree.data))
    if isinstance(tree, tuple):
        return tuple(map_floats(function, item) for item in tree)
    return tree


def leaves(tree: Any) -> list[torch.Tensor]:
    """The floating tensors of an output."""
    found: list[torch.Tensor] = []
    map_floats(lambda x: found.append(x) or x, tree)
    return found
