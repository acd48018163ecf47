"""Which kind of site a module is, and the facts about it that decide what can be done there.

A module is of a known kind only if it computes what PyTorch's class computes: a subclass that overrides `forward`, or a
method or parameter that `forward` reads, is `other`, whatever it inherits from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from narrowcast.torch.scheme import Carried

__all__ = [
    "Kind",
    "details_of",
    "float_shapes",
    "is_layer",
    "kind_of",
    "owned_children",
    "state_prefix",
    "working_module",
]

_Shapes = Mapping[str, tuple[int, ...]]


class Kind:
    """One kind of site, for some classes.

    Args:
        name: one of `narrowcast.plan.tree.KINDS`.
        classes: classes of PyTorch whose `forward` makes a module of this kind.
        details: attributes that are reported as facts, by name.
        owns: children that belong to the site and are no sites themselves.
        shapes: from a module, the shapes of the float parameters that quantizing replaces.
    """

    __slots__ = ("classes", "details", "name", "owns", "shapes")

    def __init__(
        self,
        name: str,
        classes: tuple[type[nn.Module], ...],
        *,
        details: tuple[str, ...] = (),
        owns: tuple[str, ...] = (),
        shapes: Callable[[Any], _Shapes] | None = None,
    ) -> None:
        self.name = name
        self.classes = classes
        self.details = details
        self.owns = owns
        self.shapes = shapes


def _conv_shape(module: Any) -> _Shapes:
    outer, inner = module.out_channels, module.in_channels // module.groups
    if module.transposed:
        outer, inner = module.in_channels, module.out_channels // module.groups
    return {"weight": (outer, inner, *module.kernel_size)}


def _attention_shapes(module: Any) -> _Shapes:
    width = module.embed_dim
    if module._qkv_same_embed_dim:
        projections = {"in_proj_weight": (3 * width, width)}
    else:
        projections = {
            "q_proj_weight": (width, width),
            "k_proj_weight": (width, module.kdim),
            "v_proj_weight": (width, module.vdim),
        }
    return {**projections, "out_proj.weight": (width, width)}


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LOSSES = tuple(
    value
    for value in vars(nn.modules.loss).values()
    if isinstance(value, type) and issubclass(value, nn.modules.loss._Loss) and "forward" in vars(value)
)

_LINEAR = Kind("linear", (nn.Linear,), shapes=lambda m: {"weight": (m.out_features, m.in_features)})
# Hugging Face's Conv1D is a linear layer whose weight is (in, out); known by name, so that transformers is not loaded.
_CONV1D = Kind("linear", (), shapes=lambda m: {"weight": (m.nx, m.nf)})
_KINDS = (
    _LINEAR,
    Kind(
        "embedding",
        (nn.Embedding,),
        details=("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"),
        shapes=lambda m: {"weight": (m.num_embeddings, m.embedding_dim)},
    ),
    Kind(
        "embedding",
        (nn.EmbeddingBag,),
        details=("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse", "mode", "include_last_offset"),
        shapes=lambda m: {"weight": (m.num_embeddings, m.embedding_dim)},
    ),
    Kind(
        "conv",
        _CONVOLUTIONS + _TRANSPOSED,
        details=("groups", "transposed", "padding_mode", "stride", "padding", "output_padding", "dilation"),
        shapes=_conv_shape,
    ),
    Kind("norm", _BATCH_NORMS, details=("affine", "track_running_stats", "eps")),
    Kind("norm", _INSTANCE_NORMS, details=("affine", "track_running_stats", "eps")),
    Kind("norm", (nn.GroupNorm,), details=("affine", "num_groups", "eps")),
    Kind("norm", (nn.LayerNorm, nn.RMSNorm), details=("elementwise_affine", "eps")),
    Kind("norm", (nn.LocalResponseNorm, nn.CrossMapLRN2d)),
    Kind(
        "attention",
        (nn.MultiheadAttention,),
        details=("embed_dim", "num_heads", "kdim", "vdim", "batch_first", "dropout"),
        owns=("out_proj",),
        shapes=_attention_shapes,
    ),
    Kind(
        "recurrent",
        (nn.LSTM, nn.GRU, nn.RNN),
        details=("mode", "num_layers", "bidirectional", "hidden_size", "batch_first"),
    ),
    Kind("recurrent", (nn.LSTMCell, nn.GRUCell, nn.RNNCell), details=("hidden_size",)),
    Kind("softmax", (nn.Softmax, nn.LogSoftmax, nn.Softmin), details=("dim",)),
    Kind("softmax", (nn.Softmax2d,)),
    Kind("loss", _LOSSES),
)
# Several classes may inherit one forward (BatchNorm1d and BatchNorm2d), hence a list for each.
_BY_FORWARD: dict[Any, list[tuple[Kind, type[nn.Module]]]] = {}
for _kind in _KINDS:
    for _cls in _kind.classes:
        _BY_FORWARD.setdefault(_cls.forward, []).append((_kind, _cls))

_CONV1D_NAME = "transformers.pytorch_utils.Conv1D"


def qualified(cls: type) -> str:
    """Returns the class's full name, `torch.nn.modules.linear.Linear`."""
    return f"{cls.__module__}.{cls.__qualname__}"


@lru_cache(maxsize=4096)
def _known(cls: Any) -> Kind | None:
    """The kind of every plain instance of `cls`, or `None` where the class computes something of its own."""
    for base in cls.__mro__:
        if qualified(base) == _CONV1D_NAME:
            return _CONV1D if cls.forward is base.forward else None
    for kind, base in _BY_FORWARD.get(cls.forward, ()):
        if issubclass(cls, base) and all(_same(cls, base, name) for name in _reads(cls.forward)):
            return kind
    return None


def _reads(function: object) -> tuple[str, ...]:
    return function.__code__.co_names if isinstance(function, FunctionType) else ()


def _same(cls: type, base: type, name: str) -> bool:
    missing = object()
    return getattr(cls, name, missing) is getattr(base, name, missing)


@dataclass(frozen=True, slots=True)
class _Class:
    """What a class says of all its instances; found once, since models have few classes and many modules."""

    record: Kind | None
    inherits_known: bool
    is_script: bool
    is_lazy: bool
    is_list: bool
    is_carried: bool
    has_core: bool
    stated_kind: str | None
    says_built: bool


@lru_cache(maxsize=4096)
def _class(cls: Any) -> _Class:
    original = cls._narrowcast_base if issubclass(cls, Carried) else cls
    return _Class(
        record=None if issubclass(original, ScriptModule) else _known(original),
        inherits_known=any(issubclass(original, known) for kind in _KINDS for known in kind.classes),
        is_script=issubclass(original, ScriptModule),
        is_lazy=issubclass(original, LazyModuleMixin),
        is_list=issubclass(original, nn.ParameterList | nn.ParameterDict),
        is_carried=issubclass(cls, Carried),
        has_core=getattr(original, "_narrowcast_core", False),
        stated_kind=getattr(original, "_narrowcast_kind", None),
        says_built=hasattr(original, "built"),
    )


def _of(module: nn.Module) -> _Class:
    cls: Any = type(module)  # a class hashes by identity, whatever mypy thinks of nn.Module
    return _class(cls)


def _record(module: nn.Module) -> Kind | None:
    return None if "forward" in module.__dict__ else _of(module).record


def is_layer(module: nn.Module) -> bool:
    """Says whether a module is a layer of `narrowcast.layers`, which is imported only where one is met."""
    return getattr(type(module), "_narrowcast_layer", False) is True


def working_module(module: nn.Module) -> nn.Module:
    """Returns the module that schemes work on at the site of `module`: itself, or the core that computes for it.

    A class says with `_narrowcast_core` that its child `core` does all its arithmetic (the layers of
    `narrowcast.layers` do). Such a layer is one site at its own path, of the core's kind, with the core's parameters.
    """
    core = module._modules.get("core") if _of(module).has_core else None
    return module if core is None else core


def state_prefix(module: nn.Module) -> str:
    """Returns what stands before the names of the parameters of `working_module` in the state of `module`."""
    return "" if working_module(module) is module else "core."


def kind_of(module: nn.Module, *, has_parameters: bool) -> str:
    """Returns the kind of `module`, one of `narrowcast.plan.tree.KINDS`.

    Args:
        module: the module; if it carries a policy, the kind is that of the class it had before.
        has_parameters: whether it owns parameters. A module without, and with children, is a container.
    """
    module = working_module(module)
    record = _record(module)
    if record is not None:
        return record.name
    facts = _of(module)
    if facts.stated_kind is not None:
        return facts.stated_kind
    is_container = not has_parameters and bool(module._modules) and not facts.is_script
    return "container" if is_container else "other"


def owned_children(module: nn.Module) -> tuple[str, ...]:
    """Returns the names of the children that belong to the site of `module` and are no sites themselves."""
    if not module._modules:
        return ()
    if _of(module).is_script:
        return tuple(module._modules.keys())  # its own mapping, which does not iterate
    if working_module(module) is not module:
        return ("core",)
    record = _record(module)
    if record is not None:
        return record.owns
    lists = [name for name, child in module._modules.items() if child is not None and _of(child).is_list]
    return (*lists, "parametrizations") if _is_parametrized(module) else tuple(lists)


def float_shapes(module: nn.Module) -> _Shapes:
    """Returns the shapes of the parameters that a quantized layer keeps in another form, by their float names."""
    module = working_module(module)
    record = _record(module)
    return record.shapes(module) if record is not None and record.shapes is not None else {}


def details_of(module: nn.Module) -> dict[str, Any]:
    """Returns the facts about `module` that decide what can be done at it: plain values, no false and `None` ones.

    `refuses` is a sentence: no policy at all can be carried out there, and why.
    """
    facts: dict[str, Any] = {}
    if (_of(module).says_built or "built" in module.__dict__) and not module.built:
        facts["refuses"] = "a layer that is not built has no shapes yet; build it, or run one batch through the model"
        return facts
    module = working_module(module)
    record = _record(module)
    if record is not None:
        facts = {name: getattr(module, name) for name in record.details}
        if record is _CONV1D:
            facts["transposed"] = True
    elif _is_parametrized(module):
        facts["parametrized"] = ", ".join(sorted(module.parametrizations))  # type: ignore[arg-type]
    elif _of(module).inherits_known:
        facts["overrides"] = "forward, or what it reads, is not that of the PyTorch class it inherits from"
    refusal = _refusal(module)
    if refusal:
        facts["refuses"] = refusal
    return {name: _plain(value) for name, value in facts.items() if value is not None and value is not False}


def _plain(value: Any) -> Any:
    """The value as one that JSON has: modules are made with NumPy's numbers too."""
    if isinstance(value, bool | int | float | str):
        return value
    return int(value) if hasattr(value, "__index__") else str(value)


def _is_parametrized(module: nn.Module) -> bool:
    # Looked up as a child: asking a module for an attribute that it has not is slow.
    return "parametrizations" in module._modules and parametrize.is_parametrized(module)


def _refusal(module: nn.Module) -> str:
    facts = _of(module)
    if facts.is_script:
        return "a TorchScript module runs its compiled code whatever its class; use the module it was made from"
    if facts.is_lazy and module.has_uninitialized_params():  # type: ignore[operator]
        return "a lazy module has no shapes yet; run one batch through the model first"
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance, which a class cannot see; remove the replacement first"
    hooks = module._forward_pre_hooks
    if hooks and any(type(hook).__module__.startswith("torch.nn.utils.") for hook in hooks.values()):
        return (
            "a hook of torch.nn.utils computes its weight (weight_norm, spectral_norm, prune); "
            "use torch.nn.utils.parametrizations, or remove the hook first"
        )
    if facts.is_carried:
        return ""
    if any(isinstance(module.__dict__.get(name), Tensor) for name in ("weight", "bias")):
        return "its weight is a plain tensor, not a parameter"
    if any(type(p).__name__ == "DTensor" for p in module._parameters.values()):
        return "its parameters are sharded already; apply the policy before fully_shard"
    return ""
