"""The paper's first figure: attention of TRA beside FoT on the same flip-flop sequence."""

import torch
from matplotlib.figure import Figure

from tra.errors import RunError
from tra.experiments.experiment import Experiment, Outcome
from tra.experiments.table1 import TABLE1
from tra.report.figures import attention_heatmap

TOKENS = 32


@torch.inference_mode()
def heatmaps(outcome: Outcome, length: int = TOKENS) -> Figure:
    """The weights of each row's first finished run, all on one sequence."""
    if not outcome.cells:
        raise RunError("attention is drawn from runs that are here, and there is none: leave out --join")
    weights: dict[str, list[torch.Tensor]] = {}
    symbols: list[str] = []
    for cell in outcome.cells:
        if cell.row not in weights:
            run = cell.run
            tokens, symbols = run.task.example(length)
            on_device = tokens[None].to(run.model.head.weight.device)
            weights[cell.row] = [layer[0] for layer in run.model.attention_weights(on_device)]
    return attention_heatmap(weights, symbols)


FIGURE1 = Experiment(
    scales={name: {"flip_flop": columns["flip_flop"]} for name, columns in TABLE1.scales.items()},
    rows=("tra", "fot"),
    figures=lambda outcome: {"attention": heatmaps(outcome)},
)
