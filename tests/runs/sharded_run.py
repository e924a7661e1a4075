"""One of two processes that train a run with FSDP and look at it from inside: FOLDER STEP, after which to stop."""

import os
import signal
import sys
from pathlib import Path

import torch
from torch.distributed.fsdp import FSDPModule

import tra.training
from tra import Decoder
from tra.checkpoint import latest
from tra.errors import Interrupted
from tra.recipes import Recipe
from tra.tasks import Batch
from tra.training import train


def main(folder: Path, last: int) -> None:
    recipe = Recipe.from_json((folder / "recipe.json").read_text())
    pieces = recipe.accumulate * (last - latest(folder / "checkpoints").step)
    summed_loss = tra.training.summed_loss

    def observed(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        nonlocal pieces
        pieces -= 1
        if pieces == 0 and last < recipe.steps and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)  # one is told to stop; both must save
        assert all(isinstance(unit, FSDPModule) for unit in (model, *model.blocks))
        assert all(2 * parameter.to_local().numel() == parameter.numel() for parameter in model.parameters())
        return summed_loss(model, batch)

    tra.training.summed_loss = observed
    try:
        model = train(recipe, folder)
    except Interrupted:
        assert last < recipe.steps
    else:
        assert type(model) is Decoder
        saved = latest(folder / "checkpoints").tensors("model")
        assert all(torch.equal(saved[name], tensor) for name, tensor in model.state_dict().items())
    assert pieces == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
