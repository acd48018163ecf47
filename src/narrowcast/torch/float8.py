"""float8 on PyTorch. Importing this registers its schemes; each kind of layer has a file of its own.

========================  =======================================================================
`float8_rounding`         rounding to float8 in float32, fast
`float8_gemm`             multiplying float8 values: real float8 GEMMs, or the same values emulated
`float8_product`          the product of a layer with its gradients, one function a recipe
`float8_state`            what delayed scaling remembers, and how that is saved and loaded
`float8_clock`            when it moves on
`float8_scheme`           how a module comes to multiply in float8
========================  =======================================================================
"""

from narrowcast.torch.float8_attention import DelayedAttention, Float8Attention
from narrowcast.torch.float8_clock import advance, set_clock
from narrowcast.torch.float8_linear import DelayedConv1D, DelayedLinear, Float8Conv1D, Float8Linear

__all__ = [
    "DelayedAttention",
    "DelayedConv1D",
    "DelayedLinear",
    "Float8Attention",
    "Float8Conv1D",
    "Float8Linear",
    "advance",
    "set_clock",
]
