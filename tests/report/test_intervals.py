"""95% intervals against closed forms."""

import math
import random
from collections.abc import Sequence

import pytest

from tests.report.measured import marked, stretches
from tra.report.intervals import difference, interval, spread, unseen
from tra.tasks import ExactMatch, Result

NORMAL = 1.959964
"""Of the standard normal distribution, 95% lies within so much of 0."""


def bounds(places: Sequence[Sequence[Result]], field: str = "exact_match") -> tuple[float, float]:
    found = interval(places, field)
    assert found is not None
    return found


def width(places: Sequence[Sequence[Result]]) -> float:
    low, high = bounds(places)
    return high - low


def drawn(share: float, number: int, seed: int = 0) -> list[bool]:
    """As many right as the share says, in any order."""
    right = [i < round(share * number) for i in range(number)]
    random.Random(seed).shuffle(right)
    return right


@pytest.mark.parametrize("share, number", [(0.5, 400), (0.9, 1000), (0.2, 111), (0.75, 5000)])
def test_of_one_seed_it_is_that_of_the_binomial(share: float, number: int) -> None:
    """More sequences than are drawn one by one are taken together, which changes nothing."""
    share = round(share * number) / number
    low, high = bounds([[marked(drawn(share, number))]])
    error = math.sqrt(share * (1 - share) / number)
    assert low == pytest.approx(share - NORMAL * error, abs=0.25 * error)
    assert high == pytest.approx(share + NORMAL * error, abs=0.25 * error)


def test_of_a_mean_over_lengths_it_is_narrower_as_their_sequences_are_different_ones() -> None:
    one = [[marked(drawn(0.5, 400), 8)]]
    four = [[marked(drawn(0.5, 400), length)] for length in (8, 16, 32, 64)]  # even where the same ones are right
    assert width(four) / width(one) == pytest.approx(0.5, rel=0.15)


def test_sequences_that_all_seeds_share_are_counted_once() -> None:
    """Three seeds that are right on the same sequences say no more of them than one does."""
    right = drawn(0.6, 300)
    low, high = bounds([[marked(right)]])
    again = bounds([[marked(right)] * 3])
    assert again == pytest.approx((low, high), abs=1e-12)
    # Had they been others for every seed, the interval would be narrower by the root of three.
    apart = bounds([[marked(drawn(0.6, 300, seed))] for seed in range(3)])
    assert apart[1] - apart[0] == pytest.approx((high - low) / math.sqrt(3), rel=0.2)


def test_seeds_that_differ_make_it_wider_than_sequences_alone() -> None:
    """Of seeds at 0, 0.5 and 1 the mean of three drawn ones has a deviation of 1 / sqrt 18."""
    alone = bounds([[marked(drawn(0.5, 900))]])
    seeds = bounds([[marked(drawn(share, 900, seed)) for seed, share in enumerate((0.0, 0.5, 1.0))]])
    assert seeds[0] < alone[0] - 0.1
    assert seeds[1] > alone[1] + 0.1
    assert seeds == pytest.approx((0.0, 1.0), abs=0.2)


@pytest.mark.parametrize("worst", range(3))
def test_of_three_seeds_it_reaches_each_that_stands_alone(worst: int) -> None:
    """That all three drawn are this one has a chance of 1 in 27, more than the 2.5% outside of a bound."""
    shares = [0.8 if seed == worst else 0.2 for seed in range(3)]
    low, high = bounds([[marked(drawn(share, 5000, seed)) for seed, share in enumerate(shares)]])
    assert high == pytest.approx(0.8, abs=0.01)
    low, high = bounds([[marked(drawn(1 - share, 5000, seed)) for seed, share in enumerate(shares)]])
    assert low == pytest.approx(0.2, abs=0.01)


@pytest.mark.parametrize("number", [1, 7, 100, 3000])
def test_where_nothing_failed_or_nothing_succeeded_it_is_the_exact_binomial_one(number: int) -> None:
    """Clopper and Pearson: (1 - p)^n = 2.5% at the bound."""
    low, high = bounds([[marked([True] * number)]])
    assert high == 1.0
    assert low**number == pytest.approx(0.025)
    low, high = bounds([[marked([False] * number)] * 2])
    assert low == 0.0
    assert (1 - high) ** number == pytest.approx(0.025)


def test_lengths_that_are_all_right_and_all_wrong_leave_room_on_both_sides() -> None:
    right, wrong = [marked([True] * 50)], [marked([False] * 20)]
    low, high = bounds([right, right, wrong])
    assert low == pytest.approx(2 / 3 * 0.025 ** (1 / 100))
    assert high == pytest.approx(2 / 3 + (1 - 0.025 ** (1 / 20)) / 3)


def test_it_is_the_same_every_time() -> None:
    places = [[marked(drawn(0.3, 63, seed)) for seed in range(2)]]
    assert bounds(places) == bounds(places)


def test_of_an_older_result_the_number_of_matches_says_as_much() -> None:
    new = marked(drawn(0.75, 400))
    old = ExactMatch.from_dict(
        {"set": "iid", "length": 8, "examples": 400, "loss": 0.5, "exact_match": 0.75, "token_accuracy": 1}
    )
    assert old.parts is None
    assert bounds([[old]]) == pytest.approx(bounds([[new]]), abs=0.01)
    # Its sequences are not known one by one, but are other ones at every length all the same.
    assert width([[old]] * 4) == pytest.approx(width([[old]]) / 2, rel=0.15)


def test_there_is_none_where_too_little_is_known() -> None:
    known = marked([True, False])
    unknown = ExactMatch("iid", 8, None, None, 0.5, None, 0.5, 0.5)
    assert interval([[known, unknown]], "exact_match") is None
    assert interval([[known, known], [known]], "exact_match") is None, "a seed has not come as far"


TEXT = stretches([20.0, 35.0, 28.0, 31.0, 25.0], [10, 12, 10, 11, 9], words=20, size=130)


@pytest.mark.parametrize("field", TEXT.titles)
def test_of_a_perplexity_it_holds_the_perplexity(field: str) -> None:
    low, high = bounds([[TEXT]], field)
    assert 1.0 < low < getattr(TEXT, field) < high < math.inf
    assert low > math.exp(20.0 / 10 * {"perplexity": 1, "perplexity_per_word": 2.6, "perplexity_per_byte": 0.4}[field])


def test_of_a_perplexity_it_follows_the_deviation_of_the_mean_loss() -> None:
    """Of many stretches of one length, the logarithm of the perplexity is a mean."""
    rng = random.Random(1)
    losses = [rng.gauss(30.0, 3.0) for _ in range(200)]
    low, high = bounds([[stretches(losses, [10] * 200, 700, 5000)]], "perplexity")
    mean, deviation = spread([loss / 10 for loss in losses])
    error = deviation / math.sqrt(200)
    assert math.log(low) == pytest.approx(mean - NORMAL * error, abs=0.25 * error)
    assert math.log(high) == pytest.approx(mean + NORMAL * error, abs=0.25 * error)


def test_of_a_text_in_one_stretch_or_without_words_there_is_none() -> None:
    assert interval([[stretches([20.0], [10], 5, 50)]], "perplexity") is None
    wordless = stretches([20.0, 22.0], [10, 10], 1, 50)
    object.__setattr__(wordless, "words", 0)
    assert interval([[wordless]], "perplexity_per_word") is None
    assert interval([[wordless]], "perplexity") is not None


def test_mean_and_sample_deviation() -> None:
    assert spread([0.3]) == (0.3, 0.0)
    assert spread([1.0, 2.0, 3.0]) == (2.0, 1.0)
    mean, deviation = spread([math.inf, 1.0])
    assert mean == math.inf
    assert math.isnan(deviation)


def test_what_was_not_seen_in_many_trials_is_rarer_than_three_divided_by_their_number() -> None:
    """The rule of three: (1 - p)^n = 5% at the bound."""
    for number in (10, 1000, 10**6):
        assert (1 - unseen(number)) ** number == pytest.approx(0.05)
        assert 2.5 / number < unseen(number) < 3.0 / number


def test_a_difference_on_the_same_stretches_is_surer_than_the_two_by_themselves() -> None:
    """What makes a stretch hard is common to both; the second loses 0.1 nats more a token, give or take little."""
    rng = random.Random(2)
    hard = [rng.gauss(30.0, 6.0) for _ in range(200)]
    ours = stretches(hard, [10] * 200, 700, 5000)
    theirs = stretches([loss + rng.gauss(1.0, 0.1) for loss in hard], [10] * 200, 700, 5000)
    found = difference([ours], [theirs], "perplexity")
    assert found is not None
    low, high = found
    assert low < theirs.perplexity - ours.perplexity < high
    alone = [bounds([[result]], "perplexity") for result in (ours, theirs)]
    assert high - low < 0.3 * (alone[0][1] - alone[0][0])
    assert low > 0, "which the two intervals do not show"
    assert alone[0][1] > alone[1][0]
    backwards = difference([theirs], [ours], "perplexity")
    assert backwards == pytest.approx((-high, -low))


def test_there_is_no_difference_between_what_was_read_differently() -> None:
    ours, fewer = stretches([20.0, 22.0], [10, 10], 9, 50), stretches([20.0, 22.0, 21.0], [10, 10, 10], 9, 50)
    assert difference([ours], [fewer], "perplexity") is None
    assert difference([ours, ours], [ours], "perplexity") is None
