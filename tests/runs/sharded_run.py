"""One of two processes that train a run with FSDP and look at it from inside: FOLDER STEP, after which to stop."""

import os
import signal
import sys

import torch
from torch.distributed.fsdp import FSDPModule

import tra.runs.step
from tra import Decoder
from tra.errors import Interrupted
from tra.runs import load_run, train
from tra.tasks import Batch


def main(folder: str, last: int) -> None:
    begun = load_run(folder)
    recipe = begun.recipe
    pieces = recipe.accumulate * (last - begun.step)
    summed_loss = tra.runs.step.summed_loss

    def observed(model: torch.nn.Module, batch: Batch, shards: None = None) -> torch.Tensor:
        nonlocal pieces
        pieces -= 1
        if pieces == 0 and last < recipe.steps and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)  # one is told to stop; both must save
        assert all(isinstance(unit, FSDPModule) for unit in (model, *model.blocks))
        assert all(2 * parameter.to_local().numel() == parameter.numel() for parameter in model.parameters())
        return summed_loss(model, batch)

    tra.runs.step.summed_loss = observed
    try:
        run = train(recipe, folder)
    except Interrupted:
        assert last < recipe.steps
    else:
        assert type(run.model) is Decoder
        saved = run.checkpoints.latest().tensors("model")
        assert all(torch.equal(saved[name], tensor) for name, tensor in run.model.state_dict().items())
    assert pieces == 0


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
