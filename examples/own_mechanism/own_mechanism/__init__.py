"""A plug-in of `tra`: sliding-window attention, and the sum of digits modulo ten."""

from own_mechanism.digit_sum import DigitSum
from own_mechanism.recipe import digit_sum_small
from own_mechanism.sliding_window import SlidingWindowAttention

MECHANISMS = {"sliding-window": SlidingWindowAttention}
TASKS = {"digit_sum": DigitSum}
RECIPES = {"digit-sum-small": digit_sum_small}
