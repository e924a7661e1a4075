"""NoPE: no positional encoding (Kazemnejad et al. 2023, arXiv 2305.19466) on PyTorch's SDPA."""

from torch import Tensor

from tra.attention.base import Attention, causal_softmax_attention, remember
from tra.attention.cache import Cache


class UnpositionedAttention(Attention):
    """Softmax attention that is told no positions: order reaches it through causality alone."""

    def attend(
        self,
        x: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        cache: Cache | None,
        key_mask: Tensor | None,
        segment_ids: Tensor | None,
    ) -> Tensor:
        key, value = remember(cache, key, value)
        return causal_softmax_attention(
            query, key, value, key_mask=key_mask, segment_ids=segment_ids, dropout=self.active_dropout
        )
