"""The decoder of the paper: embedding, blocks of attention and SwiGLU, norm, output head."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tra.attention import Cache, Context
from tra.attention.base import check_stream
from tra.attention.cache import StaticCache
from tra.attention.naming import find_mechanisms
from tra.config import SIZES, DecoderConfig, sized
from tra.distributed import ContextParallel, context_parallel, current
from tra.generation import GREEDY, Reader, Sampling, check_tokens, stream_tokens

__all__ = ["MLP", "SIZES", "Block", "Decoder", "DecoderConfig", "sized"]

UNCOUNTED = -100
"""A target that does not enter the loss; PyTorch's own number for it."""
LOGITS_AT_ONCE = 1 << 29
"""Beyond so many (two gigabytes of float32) the loss is computed piece by piece, and each piece again in backward."""
LOGITS_PER_PIECE = 1 << 26
READ_AT_ONCE = 4096
"""Tokens of a prompt that pass through the model together: memory does not grow with longer ones but for the cache."""
LEAST_PIECE = 16
"""Tokens of the last of these pieces, at least."""


class MLP(nn.Module):
    """SwiGLU: one projection gives values and gates."""

    def __init__(self, width: int, dropout: float, hidden: int | None = None, bias: bool = True) -> None:
        super().__init__()
        hidden = 2 * width if hidden is None else hidden
        self.expand = nn.Linear(width, 2 * hidden, bias=bias)
        self.contract = nn.Linear(hidden, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.expand(x).chunk(2, dim=-1)
        return self.contract(self.dropout(value * F.silu(gate)))


class Block(nn.Module):
    """Attention, then MLP, each behind a norm."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, config.norm_epsilon)
        self.attention = config.new_attention(layer)
        self.mlp_norm = nn.RMSNorm(config.width, config.norm_epsilon)
        self.mlp = MLP(config.width, config.dropout, config.hidden, config.mlp_bias)
        self.adds_to_normalised = config.residual == "normalised"

    def forward(self, x: Tensor, context: Context) -> Tensor:
        normed = self.attention_norm(x)
        x = normed if self.adds_to_normalised else x
        x = x + self.attention(normed, context)
        normed = self.mlp_norm(x)
        x = normed if self.adds_to_normalised else x
        return x + self.mlp(normed)

    def gates(self, x: Tensor) -> Tensor | None:
        """The gates ``[B, heads, L]`` that x opens, None if the mechanism has none."""
        return self.attention.gates(self.attention_norm(x))


class Decoder(nn.Module):
    """A decoder-only transformer whose attention mechanism is named in its config.

    Example:
        >>> model = Decoder(sized("mini", attention="tra"))
        >>> model(torch.randint(6, (2, 10))).shape
        torch.Size([2, 10, 6])
    """

    block_class: ClassVar[type[Block]] = Block

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(self.block_class(config, layer) for layer in range(config.layers))
        self.norm = nn.RMSNorm(config.width, config.norm_epsilon)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied_embeddings:
            self.head.weight = self.embedding.weight
        initialise(self.embedding)
        initialise(self.head)
        self.checkpoint_blocks = False
        """Save memory in training: backward computes each block again instead of keeping its activations."""

    def new_cache(self, folder: Path | str | None = None, capacity: int = 4096) -> list[Cache]:
        """An empty cache for this model: one per layer.

        With a folder, it lies in mapped files there (:class:`~tra.attention.cache_file.FileCache`), with room for so
        many tokens at first: a context may then be larger than memory.
        """
        if folder is None:
            return [Cache() for _ in self.blocks]
        from tra.attention.cache_file import FileCache

        return [FileCache(folder, capacity) for _ in self.blocks]

    def save_cache(
        self, path: Path | str, cache: Sequence[Cache], tokens: Tensor | None = None, tokenizer: str | None = None
    ) -> None:
        """Write a cache that this model has filled to a safetensors file, to be read on from later.

        Args:
            path: the file; it appears whole or not at all.
            cache: one for each layer.
            tokens: ``[B, L]``: what was read.
            tokenizer: what tells the tokenizer from others.
        """
        from tra.attention.cache_file import save_cache

        save_cache(path, cache, self._known_by(tokenizer), tokens)

    def load_cache(
        self, path: Path | str, cache: Sequence[Cache] | None = None, tokenizer: str | None = None
    ) -> tuple[Sequence[Cache], Tensor | None]:
        """The cache that :meth:`save_cache` wrote, in a new one or in an empty one that is given, and the tokens.

        A damaged file, or one of another model, dtype or tokenizer, is a RunError that says which.
        """
        from tra.attention.cache_file import load_cache

        caches = self.new_cache() if cache is None else cache
        return caches, load_cache(path, caches, self._known_by(tokenizer), self.embedding.weight.device)

    def _known_by(self, tokenizer: str | None) -> dict[str, str | None]:
        """What tells the caches of this model from others'."""
        weights = hashlib.sha256()
        for name, tensor in self.state_dict().items():
            some = tensor.detach().flatten()[:: max(1, tensor.numel() // 64)]  # all of a large model would take long
            weights.update(f"{name} {list(tensor.shape)} {some.double().cpu().tolist()}".encode())
        return {
            "config": json.dumps(asdict(self.config), sort_keys=True),
            "weights": weights.hexdigest()[:16],
            "dtype": str(self.embedding.weight.dtype),
            "tokenizer": tokenizer,
        }

    def forward(
        self,
        tokens: Tensor,
        *,
        cache: Sequence[Cache] | None = None,
        key_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        targets: Tensor | None = None,
        logits_to_keep: int = 0,
    ) -> Tensor:
        """Logits ``[B, L, vocabulary]`` of the token after each of ``tokens [B, L]``.

        With a cache, tokens are the new ones only; ``key_mask`` and ``segment_ids`` ``[B, cached + L]`` cover all.
        With ``logits_to_keep``, logits of the last positions only, so many; 0 means all.
        With ``targets [B, L]``, the tokens after each or -100, their cross-entropy summed over those that are not -100:
        for a long text the logits are never in memory together.
        """
        if logits_to_keep < 0:
            raise ValueError(f"logits_to_keep must be at least 0, got {logits_to_keep}")
        hidden = self.hidden(tokens, cache=cache, key_mask=key_mask, segment_ids=segment_ids)
        if targets is not None:
            return self._summed_loss(hidden, targets)
        return self.head(hidden[:, -logits_to_keep:] if logits_to_keep else hidden)

    def _summed_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        if not isinstance(targets, Tensor) or targets.dtype not in (torch.int32, torch.int64):
            kind = targets.dtype if isinstance(targets, Tensor) else type(targets).__name__
            raise ValueError(f"targets must be an int32 or int64 tensor [B, L], got {kind}")
        if targets.shape != hidden.shape[:2]:
            raise ValueError(
                f"targets must have the shape {list(hidden.shape[:2])} of tokens, got {list(targets.shape)}"
            )
        counted = targets != UNCOUNTED
        every = bool(counted.all())  # text, which need not be copied
        hidden, targets = (x.flatten(0, 1) if every else x[counted] for x in (hidden, targets))
        if targets.numel() * self.config.vocabulary <= LOGITS_AT_ONCE:
            return self._loss_of_piece(hidden, targets)
        size = max(1, LOGITS_PER_PIECE // self.config.vocabulary)
        pieces = zip(hidden.split(size), targets.split(size), strict=True)
        return torch.stack([checkpoint(self._loss_of_piece, *piece, use_reentrant=False) for piece in pieces]).sum()

    def _loss_of_piece(self, hidden: Tensor, targets: Tensor) -> Tensor:
        try:
            return F.cross_entropy(self.head(hidden).float(), targets.long(), reduction="sum")
        except IndexError:  # as in `looked_up`
            vocabulary = self.config.vocabulary
            wrong = targets[(targets < 0) | (targets >= vocabulary)][0].item()
            raise ValueError(
                f"targets must be {UNCOUNTED}, or at least 0 and less than the vocabulary of {vocabulary}, got {wrong}"
            ) from None

    def hidden(
        self,
        tokens: Tensor,
        *,
        cache: Sequence[Cache] | None = None,
        key_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
    ) -> Tensor:
        """The normalised stream ``[B, L, width]`` that the output head reads."""
        return self.hidden_from(self.embedded(tokens), cache=cache, key_mask=key_mask, segment_ids=segment_ids)

    def embedded(self, tokens: Tensor) -> Tensor:
        """The embedding ``[B, L, width]`` of ``tokens [B, L]``."""
        check_tokens(tokens)
        return self.looked_up(tokens, "tokens")

    def looked_up(self, tokens: Tensor, argument: str) -> Tensor:
        """The embedding of tokens of any shape; a ValueError names the argument if some are no tokens."""
        try:
            return self.embedding(tokens)
        except IndexError:  # a CPU looks at every token anyway; other devices say so when they come to it
            vocabulary = len(self.embedding.weight)
            wrong = tokens[(tokens < 0) | (tokens >= vocabulary)][0].item()
            raise ValueError(
                f"{argument} must be at least 0 and less than the vocabulary of {vocabulary}, got {wrong}"
            ) from None

    def hidden_from(
        self,
        embedded: Tensor,
        *,
        cache: Sequence[Cache] | None = None,
        key_mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        streams: list[Tensor] | None = None,
        weights: list[Tensor] | None = None,
        layers: int | None = None,
    ) -> Tensor:
        """As ``hidden``, from embedded tokens ``[B, L, width]``.

        What each block reads is added to ``streams``, and its attention matrix ``[B, heads, L, cached + L]`` to
        ``weights``. With ``layers``, only the first so many blocks are passed through, and the cache has so many.
        """
        layers = len(self.blocks) if layers is None else layers
        context, caches = self._context(embedded, cache, key_mask, segment_ids, layers)
        context = context._replace(weights=weights)
        x = self.dropout(embedded)
        again = self.checkpoint_blocks and self.training and torch.is_grad_enabled()
        again = again and cache is None and weights is None  # which a second pass would fill again
        for block, layer_cache in zip(islice(self.blocks, layers), caches, strict=True):
            if streams is not None:
                streams.append(x)
            own = context._replace(cache=layer_cache)
            x = checkpoint(block, x, own, use_reentrant=False) if again else block(x, own)
        return self.norm(x)

    def attention_weights(
        self, tokens: Tensor, *, key_mask: Tensor | None = None, segment_ids: Tensor | None = None
    ) -> list[Tensor]:
        """The attention matrix ``[B, heads, L, L]`` of each layer, exactly 0 where a key has no part.

        In training mode, what the blocks read has met the dropout of those before; the weights themselves meet none.
        """
        weights: list[Tensor] = []
        self.hidden_from(self.embedded(tokens), key_mask=key_mask, segment_ids=segment_ids, weights=weights)
        return weights

    def generate(self, tokens: Tensor, new: int, sampling: Sampling = GREEDY, **options: Any) -> Tensor:
        """``tokens [B, L]`` and at most ``new`` more behind them, fewer when all rows have ended.

        They are those of transformers' `generate`. ``options`` are those of :func:`tra.generation.stream_tokens`, which
        gives tokens as they come: ``key_mask``, ``end``, ``pad`` and ``generator``.

        Example:
            >>> model = Decoder(sized("mini")).eval()
            >>> model.generate(torch.tensor([[1, 2, 3]]), 4, Sampling(temperature=0.8, top_k=3)).shape
            torch.Size([1, 7])
        """
        added = stream_tokens(self.reader(), tokens, new, sampling, **options)
        return torch.cat([tokens, *(chosen[:, None] for chosen in added)], dim=1)

    def reader(self, cache: Sequence[Cache] | None = None) -> Reader:
        """What reads tokens one call after another and scores the next one, by calling this model.

        Within :func:`~tra.distributed.context_parallel` each process is given the same tokens, reads its shard of the
        first ones, and then holds what all have read: they write the same tokens if they choose by the same seed.

        Args:
            cache: where it remembers them; a new one by default, otherwise one that holds no padding.
        """
        caches = self.new_cache() if cache is None else cache
        mask: Tensor | None = None

        def read(tokens: Tensor, key_mask: Tensor | None) -> Tensor:
            nonlocal mask
            if mask is not None or key_mask is not None:
                mask = extended_mask(mask, key_mask, len(caches[0]), tokens)
            shards = current()
            if shards is None:
                return read_here(tokens)
            if not len(caches[0]) and tokens.shape[1] >= shards.size:
                return read_together(shards, tokens)
            with context_parallel(None):  # every process has read everything
                return read_here(tokens)

        def read_together(shards: ContextParallel, tokens: Tensor) -> Tensor:
            for piece in self.split_rounds(shards, READ_AT_ONCE, tokens):
                held = len(caches[0])
                own = None
                if mask is not None:
                    own = torch.cat([mask[:, :held], shards.shard(mask[:, held : held + piece.shape[1]])], 1)
                scores = self(shards.shard(piece), cache=caches, key_mask=own, logits_to_keep=1)[:, -1]
            return shards.exchange(scores.contiguous())[-1]  # of the last token, which the last process has

        def read_here(tokens: Tensor) -> Tensor:
            for piece in split_tokens(tokens, READ_AT_ONCE):
                so_far = None if mask is None else mask[:, : len(caches[0]) + piece.shape[1]]
                scores = self(piece, cache=caches, key_mask=so_far, logits_to_keep=1)[:, -1]
            return scores

        return read

    def split_rounds(self, shards: ContextParallel, size: int, tokens: Tensor) -> tuple[Tensor, ...]:
        """``[B, L, ...]`` in the pieces that processes read together, one after another through a cache: of at most
        ``size`` tokens for each of them where a mechanism's memory grows with rows x keys, otherwise in one."""
        if all(mechanism.takes_shards for mechanism in find_mechanisms(self.config.attention)):
            return (tokens,)
        return tokens.tensor_split(math.ceil(tokens.shape[1] / (size * shards.size)), dim=1)

    def _context(
        self,
        embedded: Tensor,
        cache: Sequence[Cache] | None,
        key_mask: Tensor | None,
        segment_ids: Tensor | None,
        layers: int,
    ) -> tuple[Context, Sequence[Cache | None]]:
        """The context of a call, known to fit it, and the cache of each layer."""
        check_stream("embedded", embedded, self.config.width)
        caches: Sequence[Cache | None] = [None] * layers if cache is None else cache
        if isinstance(caches, Cache) or len(caches) != layers:
            got = "Cache" if isinstance(caches, Cache) else len(caches)
            raise ValueError(f"cache must be a list of {layers}, one Cache for each layer, got {got}")
        if not any(isinstance(layer, StaticCache) for layer in caches):  # whose lengths are on a device
            lengths = [0 if layer is None else len(layer) for layer in caches]
            if len(set(lengths)) > 1:
                raise ValueError(f"cache must hold as many tokens in every layer, got {lengths}")
        context = Context(caches[0], key_mask, segment_ids)
        context.check(embedded)
        processes = current()
        if processes is not None:
            held = len(caches[0] or ())
            if held and segment_ids is not None:
                raise ValueError("segment_ids must be None behind a cache in sequences that processes share")
            own = None if key_mask is None else key_mask[:, held : held + embedded.shape[1]]
            cached = -1 if cache is None else held
            context = context._replace(shards=(processes, processes.layout(embedded, own, segment_ids, cached)))
        return context, caches


def split_tokens(tokens: Tensor, size: int) -> tuple[Tensor, ...]:
    """``[B, L, ...]`` in pieces of at most so many tokens, to be read one after another.

    The last is not much shorter than the others: a matrix product with a few rows rounds differently than one with
    many, and the pieces shall have the bits of the whole.
    """
    length, least = tokens.shape[1], min(LEAST_PIECE, size // 2)
    sizes = [min(size, length - start) for start in range(0, length, size)]
    if len(sizes) > 1 and sizes[-1] < least:
        sizes[-2:] = [sizes[-2] - least, sizes[-1] + least]
    return tokens.split(sizes, dim=1)


def extended_mask(mask: Tensor | None, new: Tensor | None, read: int, tokens: Tensor) -> Tensor:
    """The mask of so many tokens that were read and of new ones behind them, where None masks nothing."""
    ones = torch.ones(tokens.shape[0], max(read, tokens.shape[1]), dtype=torch.bool, device=tokens.device)
    before = ones[:, :read] if mask is None else mask[:, :read]
    return torch.cat([before, ones[:, : tokens.shape[1]] if new is None else new], dim=1)


def initialise(module: nn.Embedding | nn.Linear) -> None:
    """Draw the weights of an embedding or of an output head as the paper does."""
    if isinstance(module, nn.Embedding):
        nn.init.uniform_(module.weight, -0.01, 0.01)
    else:
        nn.init.normal_(module.weight, std=0.02)
