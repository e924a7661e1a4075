"""The learning rate of each mechanism at the small scale: the best of the grid that `tra reproduce tuning` measures."""

SMALL = {
    "tra": 2e-3,
    "rope": 1e-3,
    "nope": 1e-3,
    "sinusoidal": 1e-3,
    "alibi": 1e-3,
    "t5": 2e-3,
    "fot": 1e-3,
    "cope": 1e-3,
    "stick-breaking": 2e-3,
    "differential": 4e-3,
    "selective": 1e-3,
    "tra-threshold-only": 1e-3,
    "tra-distance-only": 1e-3,
    "tra-ordinary-distance": 1e-3,
}

UNTUNED = 2e-3
"""For a mechanism that is not among them."""


def small_rate(attention: str) -> float:
    return SMALL.get(attention, UNTUNED)
