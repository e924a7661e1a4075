"""The trial of benchmarks/score_distance.py is TRA where each kept key adds one to the distance."""

import runpy
from pathlib import Path

import pytest
import torch

from tra.attention.threshold_relative import LearnedThresholdAttention, ThresholdRelativeAttention

FILE = Path(__file__).parents[2] / "benchmarks" / "score_distance.py"


@pytest.mark.parametrize("learned", [False, True])
def test_with_one_for_each_kept_key_it_computes_tra(learned: bool) -> None:
    torch.manual_seed(0)
    kind = LearnedThresholdAttention if learned else ThresholdRelativeAttention
    tra = kind(12, 3, straight_through=0.5)
    if learned:
        torch.nn.init.normal_(tra.get_parameter("threshold_bias"), std=0.1)
    trial = runpy.run_path(str(FILE))["ScoreDistanceAttention"]
    counting = trial(12, 3, base=1.0, slope=0.0, learned_threshold=learned)
    counting.load_state_dict(tra.state_dict())
    x = torch.randn(2, 31, 12)
    torch.testing.assert_close(counting(x), tra(x))
    scoring = trial(12, 3, learned_threshold=learned)
    scoring.load_state_dict(tra.state_dict())
    assert not torch.allclose(scoring(x), tra(x), atol=1e-2)
