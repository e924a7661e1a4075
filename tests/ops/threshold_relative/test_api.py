"""Every wrong argument: a ValueError that names it, what it was and what was expected."""

import math

import pytest
import torch

from tests.ops.inputs import random_inputs
from tra.ops import threshold_relative_attention

QUERY, KEY, VALUE, GATE = random_inputs(batch=2, heads=4, kv_heads=2, queries=5, width=8, dtype=torch.float32)
GOOD = {"query": QUERY, "key": KEY, "value": VALUE, "log_gate": GATE}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"query": [1.0]}, r"query must be a tensor \[B, Hq, Lq, D\], got list"),
        ({"query": QUERY[0]}, r"query must have the dimensions \[B, Hq, Lq, D\], got shape \[4, 5, 8\]"),
        ({"key": KEY[0]}, r"key must have the dimensions \[B, Hkv, Lk, D\]"),
        ({"value": VALUE[0]}, r"value must have the dimensions \[B, Hkv, Lk, Dv\]"),
        ({"log_gate": GATE[0]}, r"log_gate must have the dimensions \[B, Hq, Lq\]"),
        ({"query": QUERY.long()}, "query must be float16, bfloat16, float32 or float64, got torch.int64"),
        ({"key": KEY.to("meta")}, "key must be on the device of query, cpu, got meta"),
        ({"value": VALUE.double()}, "value must have the dtype of query, torch.float32, got torch.float64"),
        ({"key": KEY[:1]}, "key must have the batch size 2 and width 8 of query, got shape \\[1, 2, 5, 8\\]"),
        ({"key": KEY[..., :4]}, "key must have the batch size 2 and width 8 of query"),
        ({"value": VALUE[:, :, :4]}, r"value must match key in \[B, Hkv, Lk\] = \[2, 2, 5\]"),
        ({"query": QUERY[:, :3], "log_gate": GATE[:, :3]}, "query must have a multiple of the 2 heads of key, got 3"),
        ({"key": KEY[:, :, :3], "value": VALUE[:, :, :3]}, r"query must not be longer than key \(3\), got 5"),
        ({"query": QUERY[..., :0], "key": KEY[..., :0]}, "query must have a width D of at least 1"),
        ({"log_gate": GATE[:, :, :3]}, r"log_gate must have the shape \[2, 4, 5\] of query, got \[2, 4, 3\]"),
        ({"log_gate": -GATE}, "log_gate must never be positive, got a maximum of"),
        ({"key_mask": [True]}, r"key_mask must be a tensor \[B, Lk\], got list"),
        ({"key_mask": torch.ones(2, 4).bool()}, r"key_mask must have the shape \[B, Lk\] = \[2, 5\], got \[2, 4\]"),
        ({"key_mask": torch.ones(2, 5)}, "key_mask must be boolean, got torch.float32"),
        ({"key_mask": torch.ones(2, 5, device="meta").bool()}, "key_mask must be on the device of query"),
        ({"segment_ids": torch.ones(2, 4).long()}, r"segment_ids must have the shape \[B, Lk\] = \[2, 5\]"),
        ({"segment_ids": torch.ones(2, 5)}, "segment_ids must be int32 or int64, got torch.float32"),
        ({"key_lengths": [5, 5]}, r"key_lengths must be a tensor \[B\], got list"),
        ({"key_lengths": torch.ones(2)}, "key_lengths must be int32 or int64, got torch.float32"),
        ({"key_lengths": torch.ones(3).int()}, r"key_lengths must have the shape \[B\] = \[2\], got \[3\]"),
        ({"key_lengths": torch.ones(2, device="meta").int()}, "key_lengths must be on the device of query"),
        ({"key_lengths": torch.ones(2).int(), "dropout": 0.5}, "dropout must be 0 with key_lengths, .*, got 0.5"),
        ({"scale": 0.0}, "scale must be a positive number, got 0.0"),
        ({"scale": math.nan}, "scale must be a positive number, got nan"),
        ({"threshold": math.inf}, "threshold must be a finite number, got inf"),
        ({"dropout": 1.0}, r"dropout must be a probability in \[0, 1\), got 1.0"),
        ({"dropout": -0.1}, "dropout must be a probability"),
        ({"tolerance": -1e-3}, "tolerance must be None or a number of at least 0, got -0.001"),
        ({"tolerance": math.nan}, "tolerance must be None or a number of at least 0, got nan"),
        ({"score_bound": 0.0}, "score_bound must be None or a positive number, got 0.0"),
        ({"score_bound": math.nan}, "score_bound must be None or a positive number, got nan"),
        ({"threshold": math.nan}, "threshold must be a finite number, got nan"),
        ({"dropout": math.nan}, "dropout must be a probability"),
        ({"scale": "a"}, "scale must be a number, got str"),
        ({"tolerance": [1.0]}, "tolerance must be a number, got list"),
        ({"straight_through": torch.ones(2)}, "straight_through must be a number, got Tensor"),
        ({"query": QUERY.to(torch.float8_e4m3fn)}, "query must be float16, .* got torch.float8_e4m3fn"),
        ({"dropout": None}, "dropout must be a number, got NoneType"),
        ({"log_gate": 0.5}, r"log_gate must be a tensor \[B, Hq, Lq\], got float"),
        ({"log_gate": GATE.long()}, "log_gate must be float16, bfloat16, float32 or float64, got torch.int64"),
        ({"log_gate": GATE.to("meta")}, "log_gate must be on the device of query, cpu, got meta"),
        ({"segment_ids": [1]}, r"segment_ids must be a tensor \[B, Lk\], got list"),
        ({"segment_ids": torch.ones(2, 5, device="meta").long()}, "segment_ids must be on the device of query"),
        ({"impl": "referense"}, "impl must be one of .*reference.*, got 'referense'; did you mean 'reference'?"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_wrong_argument_is_named(changes: dict[str, object], message: str) -> None:
    arguments = {**GOOD, **changes}
    tensors = [arguments.pop(name) for name in GOOD]
    with pytest.raises(ValueError, match=message):
        threshold_relative_attention(*tensors, **arguments)


def test_the_unchanged_arguments_are_right() -> None:
    assert threshold_relative_attention(*GOOD.values()).shape == (2, 4, 5, 8)
