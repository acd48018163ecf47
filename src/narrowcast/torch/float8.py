"""float8 on PyTorch. Importing this registers its schemes; each kind of layer has a file of its own.

========================  =======================================================================
`float8_rounding`         rounding to float8 in float32, fast
`float8_gemm`             multiplying float8 values: real float8 GEMMs, or the same values emulated
`float8_product`          the product of a layer with its gradients, one function a recipe
`float8_state`            what delayed scaling remembers, and how that is saved and loaded
`float8_clock`            when it moves on
`float8_scheme`           how a module comes to multiply in float8 while it trains
`float8_import`           reading the state of other libraries
`float8_inference`        the arithmetic on weights that are stored as float8
`float8_stored`           the layers that have such weights
========================  =======================================================================
"""

from narrowcast.torch.float8_attention import DelayedAttention, Float8Attention
from narrowcast.torch.float8_clock import advance, set_clock
from narrowcast.torch.float8_linear import DelayedConv1D, DelayedLinear, Float8Conv1D, Float8Linear
from narrowcast.torch.float8_stored import (
    DynamicAttention,
    DynamicLinear,
    StaticAttention,
    StaticLinear,
    WeightAttention,
    WeightLinear,
)

__all__ = [
    "DelayedAttention",
    "DelayedConv1D",
    "DelayedLinear",
    "DynamicAttention",
    "DynamicLinear",
    "Float8Attention",
    "Float8Conv1D",
    "Float8Linear",
    "StaticAttention",
    "StaticLinear",
    "WeightAttention",
    "WeightLinear",
    "advance",
    "set_clock",
]
