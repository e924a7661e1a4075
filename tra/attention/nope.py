"""NoPE: no positional encoding (Kazemnejad et al. 2023, arXiv 2305.19466) on PyTorch's SDPA."""

from torch import Tensor

from tra.attention.base import Attention, Context, causal_softmax_attention


class UnpositionedAttention(Attention):
    """Softmax attention without positions: order enters only through the causal mask."""

    uses_sdpa = True
    takes_static_cache = True

    def attend(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        key, value = context.remember(key, value)
        return causal_softmax_attention(query, key, value, context, dropout=self.active_dropout(context))
