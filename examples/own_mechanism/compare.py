"""A window of two tokens and TRA on sums of digits, over two seeds: `tra reproduce compare.py --jobs 2`."""

from own_mechanism.recipe import digit_sum_small

from tra.experiments import Experiment, Row

experiment = Experiment(
    scales={"small": {"digit_sum": digit_sum_small}},
    rows=[Row("sliding-window", {"window": 2}), "tra"],
    seeds=2,
)
