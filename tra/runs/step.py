"""One training step, as training, benchmarks and plans all take it."""

from contextlib import nullcontext

import torch
from accelerate import Accelerator
from torch import Tensor

from tra.distributed import ContextParallel, context_parallel
from tra.model import UNCOUNTED, Decoder
from tra.tasks import Batch


class TrainingStep:
    """Forward, loss, backward, clipping and AdamW on one batch.

    Args:
        model: what to train.
        accelerator: accelerate's view of this process.
        learning_rate: until `rate` is set to another.
        beta2: how slowly AdamW's estimate of the gradient's size changes.
        weight_decay: AdamW's.
        clip: largest norm of the gradient.
        accumulate: pieces into which a batch is divided, to save memory.
        precision: "bf16" computes under autocast.
        shards: the processes that share each sequence; by default each has whole ones.
    """

    def __init__(
        self,
        model: Decoder,
        accelerator: Accelerator,
        *,
        learning_rate: float = 1e-4,
        beta2: float = 0.999,
        weight_decay: float = 0.01,
        clip: float = 1.0,
        accumulate: int = 1,
        precision: str = "no",
        shards: ContextParallel | None = None,
    ) -> None:
        self.accelerator, self.clip, self.accumulate, self.shards = accelerator, clip, accumulate, shards
        self.lowers_precision = precision == "bf16"
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=learning_rate, betas=(0.9, beta2), weight_decay=weight_decay, fused=True
        )
        self.model, self.optimizer = accelerator.prepare(model, optimizer)

    @property
    def rate(self) -> float:
        """The learning rate."""
        return self.optimizer.param_groups[0]["lr"]

    @rate.setter
    def rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def __call__(self, batch: Batch, counted: int) -> tuple[float, float]:
        """One update from this process's part of a batch, of whose tokens ``counted`` count in all processes together;
        returns the loss over the whole batch and the norm of its gradient."""
        accelerator = self.accelerator
        total = torch.zeros((), device=accelerator.device)
        rows = len(batch) // self.accumulate
        for piece in range(self.accumulate):
            last = piece == self.accumulate - 1
            with nullcontext() if last else accelerator.no_sync(self.model):
                with torch.autocast(accelerator.device.type, torch.bfloat16, enabled=self.lowers_precision):
                    summed = summed_loss(self.model, batch[piece * rows : (piece + 1) * rows], self.shards)
                # Processes average their gradients; divided so, the average is that of one process with the batch.
                accelerator.backward(summed * (accelerator.num_processes / counted))
            total += summed.detach()
        loss = accelerator.reduce(total, "sum").item() / counted
        norm = float(accelerator.clip_grad_norm_(self.model.parameters(), self.clip))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, norm


def summed_loss(model: torch.nn.Module, batch: Batch, shards: ContextParallel | None = None) -> Tensor:
    """Cross-entropy summed over the tokens that count: all of them, or this process's share of each sequence."""
    tokens, targets = batch.tokens[:, :-1], batch.tokens[:, 1:].masked_fill(~batch.counted[:, 1:], UNCOUNTED)
    if shards is not None:
        tokens, targets = shards.shard(tokens), shards.shard(targets)
    with context_parallel(shards):
        return model(tokens, targets=targets)
