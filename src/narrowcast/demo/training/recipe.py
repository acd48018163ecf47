"""The six recipes: what is trained in which dtype, said by a policy map and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from narrowcast.dtype_policies import DTypePolicy, DTypePolicyMap, QuantizedFloat8DTypePolicy, get
from narrowcast.errors import PolicyError, closest

__all__ = ["BASELINE", "RECIPES", "Recipe", "find"]

MULTIPLICATIONS = r"blocks/\d+/(qkv|mix|up|down)"
"""The layers that float8 reaches. The head stays out: 84 characters are no multiple of 16, and its loss is the most
sensitive of all."""


@dataclass(frozen=True)
class Recipe:
    """One way to train.

    Args:
        name: what plots and tables call it.
        policy: the map that `narrowcast.apply` carries out on the model.
        scales_loss: whether gradients pass through float16 and the loss has to be scaled.
        description: what is computed in what, in a sentence.
    """

    name: str
    policy: DTypePolicyMap
    scales_loss: bool
    description: str


def _float8(policy: DTypePolicy) -> DTypePolicyMap:
    return DTypePolicyMap("mixed_bfloat16", {MULTIPLICATIONS: policy})


RECIPES = (
    Recipe("float32", DTypePolicyMap("float32"), False, "Everything in float32."),
    Recipe(
        "mixed_bfloat16",
        DTypePolicyMap("mixed_bfloat16"),
        False,
        "Arithmetic in bfloat16; parameters, norms, softmax and loss in float32.",
    ),
    Recipe(
        "mixed_float16",
        DTypePolicyMap("mixed_float16"),
        True,
        "Arithmetic in float16 with a scaled loss; parameters, norms, softmax and loss in float32.",
    ),
    Recipe(
        "float8",
        _float8(QuantizedFloat8DTypePolicy("mixed_bfloat16", amax_history_length=16)),
        False,
        "The blocks' multiplications in float8, scaled by the largest magnitudes of 16 former steps; the rest as in "
        "mixed_bfloat16.",
    ),
    Recipe(
        "float8/current",
        _float8(get("float8/current_from_mixed_bfloat16")),
        False,
        "The same, scaled by each tensor's own largest magnitude.",
    ),
    Recipe(
        "float8/rowwise",
        _float8(get("float8/rowwise_from_mixed_bfloat16")),
        False,
        "The same, scaled by each row's own largest magnitude.",
    ),
)

BASELINE = "mixed_bfloat16"
"""The recipe that the float8 ones are compared with: they differ from it in the blocks' multiplications only."""


def find(name: str) -> Recipe:
    """Returns the recipe called `name`.

    Raises:
        PolicyError: there is none.

    Example:
        >>> find("float8/current").policy["blocks/3/up"].name
        'float8/current_from_mixed_bfloat16'
    """
    names = [recipe.name for recipe in RECIPES]
    if name not in names:
        raise PolicyError(
            "Recipe is unknown",
            got={"name": name},
            expected=", ".join(names),
            suggestion=next(iter(closest(name, names)), None),
        )
    return RECIPES[names.index(name)]
