"""PyTorch: trees of modules, plans carried out on them, and saved models."""

# Importing a scheme's file registers it: one line a mode.
from narrowcast.torch import casting, float8, int8
from narrowcast.torch.amp import GradScaler
from narrowcast.torch.apply import apply, dequantize, plan, plan_of
from narrowcast.torch.float8_clock import advance, set_clock
from narrowcast.torch.saving import load, save
from narrowcast.torch.tree import tree

__all__ = [
    "GradScaler",
    "advance",
    "apply",
    "casting",
    "dequantize",
    "float8",
    "int8",
    "load",
    "plan",
    "plan_of",
    "save",
    "set_clock",
    "tree",
]
