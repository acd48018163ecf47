"""Embeddings on 8-bit tables: rows are taken as codes and dequantized, the table never is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from narrowcast.dtype_policies import DTypePolicy
from narrowcast.plan.tree import Member
from narrowcast.torch.int8_plan import describe_weights_only
from narrowcast.torch.scheme import register
from narrowcast.torch.stored_weights import StoredScheme, StoredWeights

__all__ = ["Int8Embedding", "Int8EmbeddingBag"]


class Int8Embedding(StoredWeights):
    """`nn.Embedding` with a scale for each row of its table. The table does not train.

    Numerics:
        Each row is `codes * scale` in float32, rounded once to the compute dtype.
    """

    def _narrowcast_run(self, input: Tensor) -> Any:
        return self._narrowcast_rows(input).to(self._narrowcast_compute)

    def _narrowcast_rows(self, indices: Tensor) -> Tensor:
        buffers = self._buffers  # type: ignore[attr-defined]
        codes, scale = buffers["weight_codes"], buffers["weight_scale"]
        return F.embedding(indices, codes).float() * F.embedding(indices, scale)


class Int8EmbeddingBag(Int8Embedding):
    """`nn.EmbeddingBag`, likewise; bags are summed in float32."""

    def _narrowcast_run(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Any:
        module: Any = self
        rows = self._narrowcast_rows(input.reshape(-1))
        # The rows taken become the table, so that what stands there once is looked up once.
        indices = torch.arange(rows.shape[0], device=rows.device)
        padding = module.padding_idx
        if padding is not None:
            # Entries that do not count are sent to a row of their own, which is declared to be padding.
            indices = torch.where(input.reshape(-1) == padding % module.num_embeddings, rows.shape[0], indices)
            rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
            padding = rows.shape[0] - 1
        bags = F.embedding_bag(
            indices.view(input.shape),
            rows,
            offsets,
            mode=module.mode,
            per_sample_weights=None if per_sample_weights is None else per_sample_weights.to(rows.dtype),
            include_last_offset=module.include_last_offset,
            padding_idx=padding,
        )
        return bags.to(self._narrowcast_compute)


class EmbeddingScheme(StoredScheme):
    """Carries out `int8` and `int8/weight`, which are the same at embeddings.

    Args:
        is_told: whether plans say that only weights are quantized, as the mode's name does not.
    """

    def __init__(self, *, is_told: bool) -> None:
        self._is_told = is_told

    def _carrier(self, base: type[nn.Module]) -> type[StoredWeights]:
        return Int8EmbeddingBag if issubclass(base, nn.EmbeddingBag) else Int8Embedding

    def _refusal(self, member: Member) -> str:
        if member.detail("max_norm") is not None:
            return "max_norm writes into the table at each look-up, and codes are not written to"
        return super()._refusal(member)

    def _describe(self, member: Member, policy: DTypePolicy, device: str) -> tuple[str, str, int]:
        _, reason, _ = describe_weights_only("", is_told=self._is_told)
        return "rows of codes gathered and dequantized", reason, 0


register("int8", ["embedding"], EmbeddingScheme(is_told=True))
register("int8/weight", ["embedding"], EmbeddingScheme(is_told=False))
