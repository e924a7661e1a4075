"""What is timed: attention on inputs like those in a language model, and tokens and steps of whole models.

Each function prepares everything and returns the work.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tra.attention import Cache
from tra.bench.timing import Work
from tra.model import Decoder, DecoderConfig
from tra.ops import threshold_relative_attention
from tra.runs.distributed import make_accelerator
from tra.runs.step import TrainingStep
from tra.tasks import Batch

WIDTH = 64
"""Of a head."""
BOUND = math.sqrt(WIDTH)
"""On the scores of normalised queries and keys."""

Rule = Callable[..., Tensor]


def language_like(batch: int, heads: int, queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random normalised queries and keys, with gates distributed as in a trained language model."""
    rng = torch.Generator().manual_seed(0)
    query = F.rms_norm(torch.randn(batch, heads, queries, WIDTH, generator=rng), (WIDTH,))
    key = F.rms_norm(torch.randn(batch, heads, keys, WIDTH, generator=rng), (WIDTH,))
    value = torch.randn(batch, heads, keys, WIDTH, generator=rng)
    gate = -torch.exp(math.log(0.7) + 1.1 * torch.randn(batch, heads, queries, generator=rng))
    return query, key, value, gate


def native(tolerance: float | None = None, straight_through: float = 0.0) -> Rule:
    """The mechanism as the CPU kernel computes it. A tolerance of 0 visits every key."""
    return partial(
        threshold_relative_attention,
        tolerance=tolerance,
        straight_through=straight_through,
        score_bound=BOUND,
        impl="cpu",
    )


def papers_listing(query: Tensor, key: Tensor, value: Tensor, log_gate: Tensor) -> Tensor:
    """The mechanism as the paper writes it: dense matrices."""
    score = torch.relu(query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])).tril()
    keep = score.detach() > 0
    distance = keep.float().flip(-1).cumsum(-1).flip(-1)
    logits = torch.where(keep, score + log_gate[..., None] * distance, -torch.inf)
    return torch.where(keep, logits.softmax(-1), 0.0) @ value


def attention(
    rule: Rule,
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    *,
    backward: bool = False,
    gated: bool = True,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Work:
    """A rule applied to language-like inputs, waited for; one that is not gated gets queries, keys and values only. The
    gate keeps its precision."""
    query, key, value, gate = (x.to(device) for x in language_like(batch, heads, queries, keys))
    leaves = [x.to(dtype) for x in (query, key, value)] + [gate] * gated
    if not backward:
        return _waited_for(torch.inference_mode()(lambda: rule(*leaves)), device)
    for leaf in leaves:
        leaf.requires_grad_()
    grad = torch.ones(batch, heads, queries, WIDTH, device=device, dtype=dtype)
    return _waited_for(lambda: torch.autograd.grad(rule(*leaves), leaves, grad), device)


def _waited_for(work: Work, device: str) -> Work:
    def done() -> object:
        result = work()
        torch.cuda.synchronize()
        return result

    return work if device == "cpu" else done


def new_token(config: DecoderConfig, cached: int) -> Work:
    """One step of generation: a token goes through a whole model whose cache holds so many random ones."""
    torch.manual_seed(0)
    model = Decoder(config).eval()
    cache = model.new_cache()
    head_width = config.width // config.heads
    for layer in cache:
        key, value = torch.randn(2, 1, config.kv_heads or config.heads, cached + 1, head_width)
        layer.append(F.rms_norm(key, (head_width,)), value)
        layer.crop(cached)  # with room for one more
    return next_token(model, cache, torch.zeros(1, 1, dtype=torch.int64))


def next_token(model: Decoder, cache: list[Cache], token: Tensor) -> Work:
    """A token ``[1, 1]`` goes through a model as in generation, always behind what its cache holds now."""
    cached, read = len(cache[0]), model.reader(cache)

    @torch.inference_mode()
    def work() -> None:
        read(token, None)
        for layer in cache:
            layer.crop(cached)

    return work


def training_step(config: DecoderConfig, batch: int, length: int, device: str = "cpu", precision: str = "no") -> Work:
    """A step of training as `tra train` takes it, on random tokens that all count."""
    torch.manual_seed(0)
    step = TrainingStep(Decoder(config), make_accelerator(device=device), precision=precision)
    tokens = torch.randint(config.vocabulary, (batch, length + 1))
    random = Batch(tokens, torch.ones_like(tokens, dtype=torch.bool)).to(step.accelerator.device)
    return lambda: step(random, batch * length)
