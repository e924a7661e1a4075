"""Measure a run in each of several processes, which write down how many batches they predicted and what all found."""

import json
import sys
from pathlib import Path

from tra.runs import Run, evaluate, evaluation
from tra.runs.distributed import joined

predict, batches = evaluation._predict, 0


def counted(*arguments):
    global batches
    batches += 1
    return predict(*arguments)


evaluation._predict = counted
with joined():
    import torch.distributed

    rank = torch.distributed.get_rank()
    results = evaluate(Run(sys.argv[1]))
found = {"batches": batches, "results": [result.to_dict() for result in results]}
Path(sys.argv[2], f"rank-{rank}.json").write_text(json.dumps(found))
