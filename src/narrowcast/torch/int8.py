"""int8 and int8/weight on PyTorch. Importing this registers their schemes; each kind of layer has a file of its own.

=====================  ==========================================================================
`int8_gemm`            the arithmetic of a linear layer: eager, with gradients, traced
`kernels`              which integer kernel runs, and what it derives from a weight
`stored_weights`       how a module comes to hold weights as codes, and floats again
`int8_plan`            what plans say of it
=====================  ==========================================================================
"""

from narrowcast.torch.int8_attention import Int8Attention, Int8WeightAttention
from narrowcast.torch.int8_conv import Int8Conv, Int8ConvTranspose
from narrowcast.torch.int8_embedding import Int8Embedding, Int8EmbeddingBag
from narrowcast.torch.int8_linear import Int8Linear, Int8WeightLinear

__all__ = [
    "Int8Attention",
    "Int8Conv",
    "Int8ConvTranspose",
    "Int8Embedding",
    "Int8EmbeddingBag",
    "Int8Linear",
    "Int8WeightAttention",
    "Int8WeightLinear",
]
