"""What a mechanism's signature says about its options, and what is said about wrong ones."""

import re
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from tra.attention import MECHANISMS, Attention, Context, options_of
from tra.signatures import checked_options, format_value, mismatch

ROTARY = ["qk_norm", "theta", "scaling", "factor", "trained_length"]
TRA = ["qk_norm", "tolerance", "impl", "gate_bias", "threshold", "threshold_start", "straight_through"]
OPTIONS = {
    "tra": TRA,
    "tra-learned": TRA,
    "rope": ROTARY,
    "nope": ["qk_norm"],
    "sinusoidal": ["qk_norm", "theta"],
    "alibi": ["qk_norm"],
    "t5": ["qk_norm", "buckets", "max_distance"],
    "kerple": ["qk_norm"],
    "fire": ["qk_norm", "hidden", "rate", "shortest"],
    "fot": ["qk_norm", "gate_bias"],
    "cope": ["qk_norm", "positions"],
    "stick-breaking": ["qk_norm"],
    "differential": [*ROTARY, "lambda_start"],
    "selective": ROTARY,
    "path": ["qk_norm", "rank"],
    "nape": ["qk_norm"],
    "ssmax": ["qk_norm", "positions"],
    "asentmax": ["qk_norm", "positions"],
    "tra-threshold-only": ["qk_norm", "tolerance", "impl", "threshold"],
    "tra-distance-only": ["qk_norm", "tolerance", "impl", "gate_bias"],
    "tra-ordinary-distance": ["qk_norm", "gate_bias", "threshold"],
}


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_options_are_the_keyword_only_arguments_that_the_decoder_does_not_give(name: str) -> None:
    options = options_of(MECHANISMS[name])
    assert list(options) == OPTIONS[name]
    assert all(option.name == key for key, option in options.items())
    assert options["qk_norm"] == ("qk_norm", True, bool)


def test_the_documentation_lists_all_options_with_their_defaults() -> None:
    page = (Path(__file__).parents[2] / "docs" / "mechanisms.md").read_text()
    listed = set()
    for option, owners, default in re.findall(r"^\| `(\w+)` \| (all|`[^|]+`) \| (\S+) \|", page, flags=re.MULTILINE):
        names = MECHANISMS if owners == "all" else re.findall(r"`([^`]+)`", owners)
        listed |= {(name, option, default) for name in names}
    assert listed == {
        (name, option.name, str(option.default))
        for name, mechanism in MECHANISMS.items()
        for option in options_of(mechanism).values()
    }


class Windowed(Attention):
    """Takes no ``**shared``, so that it decides what it shares; one option has neither default nor annotation."""

    def __init__(self, width: int, heads: int, kv_heads: int | None = None, *, window, layer=0, dropout=0.0) -> None:  # type: ignore[no-untyped-def]
        super().__init__(width, heads, kv_heads, layer=layer, dropout=dropout, qk_norm=False)
        self.window = window

    def attend(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        return value


def test_a_signature_without_shared_arguments_ends_the_walk() -> None:
    options, given = options_of(Windowed), {"window": object}
    assert list(options) == ["window"]
    assert checked_options(options, given, "attention_options", "windowed") == given
    with pytest.raises(ValueError, match="window must be given in attention_options of windowed"):
        checked_options(options, {}, "attention_options", "windowed")


def test_options_come_in_the_order_of_the_signature_and_whole_numbers_as_floats() -> None:
    given = {"trained_length": 7, "theta": 10_000, "scaling": "yarn", "factor": 2}
    checked = checked_options(options_of(MECHANISMS["rope"]), given, "attention_options", "rope")
    assert list(checked.items()) == [("theta", 10_000.0), ("scaling", "yarn"), ("factor", 2.0), ("trained_length", 7)]
    assert [type(value) for value in checked.values()] == [float, str, float, int]


@pytest.mark.parametrize(
    "name, given, message",
    [
        (
            "rope",
            {"thta": 1.0},
            "attention_options of rope must be among qk_norm, theta, scaling, factor, trained_length, got 'thta'; "
            "did you mean 'theta'?",
        ),
        ("nope", {"zeal": 1.0}, "attention_options of nope must be among qk_norm, got 'zeal'"),
        (
            "tra-distance-only",
            {"threshold": 1.0},
            "attention_options of tra-distance-only must be among qk_norm, tolerance, impl, gate_bias, got 'threshold'",
        ),
        ("cope", {3: 1}, "attention_options of cope must be among qk_norm, positions, got 3"),
        ("rope", {"dropout": 0.5}, "must be among qk_norm, theta, scaling, factor, trained_length, got 'dropout'"),
        ("rope", {"layer": 3}, "must be among qk_norm, theta, scaling, factor, trained_length, got 'layer'"),
        ("rope", {"theta": "10"}, "theta in attention_options of rope must be a finite number, got '10'"),
        ("rope", {"theta": True}, "theta in attention_options of rope must be a finite number, got True"),
        ("rope", {"theta": None}, "theta in attention_options of rope must be a finite number, got None"),
        ("rope", {"theta": float("nan")}, "theta in attention_options of rope must be a finite number, got nan"),
        ("rope", {"theta": 10**400}, "theta in attention_options of rope must be a finite number, got 1000"),
        (
            "rope",
            {"trained_length": 8.0},
            "trained_length in attention_options of rope must be a whole number or None, got 8.0",
        ),
        (
            "rope",
            {"scaling": "yarm"},
            "scaling in attention_options of rope must be 'none' or 'linear' or 'ntk' or 'yarn', got 'yarm'; "
            "did you mean 'yarn'?",
        ),
        ("cope", {"positions": True}, "positions in attention_options of cope must be a whole number, got True"),
        ("fot", {"qk_norm": 1}, "qk_norm in attention_options of fot must be True or False, got 1"),
        ("tra", {"gate_bias": "x"}, "gate_bias in attention_options of tra must be a finite number or None, got 'x'"),
        ("tra", {"impl": None}, "impl in attention_options of tra must be a string, got None"),
        ("tra", None, "attention_options must be a dict of options, got None"),
        ("tra", ["threshold"], "attention_options must be a dict of options, got ['threshold']"),
    ],
)
def test_a_wrong_option_is_one_line_that_names_it(name: str, given: Any, message: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        checked_options(options_of(MECHANISMS[name]), given, "attention_options", name)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "value, annotation",
    [
        (1, float),
        (1.5, float | None),
        (None, float | None),
        (3, int),
        (False, bool),
        ("b", Literal["a", "b"]),
        (None, Literal["a"] | None),
        ([1], list[int]),
        (object(), Any),
    ],
)
def test_right_values_match(value: Any, annotation: Any) -> None:
    assert mismatch(value, annotation) is None


@pytest.mark.parametrize("value, annotation", [(1, Literal[True]), (1.0, int), (1, str), ((1,), list[int])])
def test_values_of_another_type_do_not_match(value: Any, annotation: Any) -> None:
    assert mismatch(value, annotation) is not None


@pytest.mark.parametrize(
    "value, expected",
    [
        (10_000.0, "10000"),
        (0.5, "0.5"),
        (1e-06, "1e-06"),
        (1_234_567.5, "1234567.5"),
        (1e6, "1e+06"),
        (64, "64"),
        (1_234_567, "1234567"),
        (False, "False"),
        (None, "None"),
        ("ntk", "ntk"),
    ],
)
def test_values_are_written_as_short_as_they_can_be(value: Any, expected: str) -> None:
    assert format_value(value) == expected


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("rope", {"theta": 1.0}, "theta must be greater than 1, got 1.0"),
        (
            "rope",
            {"scaling": "yarm"},
            "scaling must be one of .*, got 'yarm'; did you mean 'yarn'",
        ),
        ("rope", {"factor": 2.0}, "factor must be 1 without scaling, got 2.0"),
        ("rope", {"scaling": "linear"}, "factor must be greater than 1 for scaling 'linear', got 1.0"),
        ("rope", {"scaling": "yarn", "factor": 2.0}, "trained_length must be at least 1 for scaling 'yarn', got None"),
        ("selective", {"trained_length": 8}, "trained_length must be None for scaling 'none', got 8"),
        ("sinusoidal", {"theta": 0.5}, "theta must be greater than 1, got 0.5"),
        ("differential", {"lambda_start": 1.0}, r"lambda_start must be in \[0, 1\), got 1.0"),
        ("cope", {"positions": 0}, "positions must be at least 1, got 0"),
        ("t5", {"max_distance": 16}, r"max_distance must exceed half of the buckets \(32\), got 16"),
        ("tra", {"tolerance": -1.0}, "tolerance must be None or a number of at least 0, got -1.0"),
        ("tra-threshold-only", {"impl": "cpv"}, "impl must be one of .*, got 'cpv'; did you mean 'cpu'?"),
        ("nope", {"layer": -1}, "layer must be at least 0, got -1"),
    ],
)
def test_a_mechanism_names_the_argument_that_makes_no_sense(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MECHANISMS[name](16, 2, **options)


def test_scaling_by_theta_needs_a_second_pair() -> None:
    with pytest.raises(ValueError, match="width // heads must be more than one pair for scaling 'ntk'"):
        MECHANISMS["rope"](4, 2, scaling="ntk", factor=2.0)


GATED = ["tra", "tra-learned", "fot", "tra-distance-only", "tra-ordinary-distance"]


@pytest.mark.parametrize("name", GATED)
def test_a_given_gate_bias_replaces_the_drawn_one_and_moves_no_other_draw(name: str) -> None:
    drawn, after = [], []
    for options in ({}, {"gate_bias": None}, {"gate_bias": 3.0}):
        torch.manual_seed(5)
        drawn.append(MECHANISMS[name](16, 2, **options).state_dict())
        after.append(torch.rand(3))
    plain, default, given = drawn
    assert all(torch.equal(plain[key], default[key]) for key in plain)
    assert plain["gate.bias"].unique().numel() == 2
    assert torch.equal(given.pop("gate.bias"), torch.tensor([3.0, 3.0]))
    assert all(torch.equal(plain[key], given[key]) for key in given)
    assert torch.equal(after[0], after[1])
    assert torch.equal(after[0], after[2])


def test_ablations_start_as_tra_does_from_the_same_seed() -> None:
    starts = {}
    for name in ("tra", "tra-learned", "tra-threshold-only", "tra-distance-only", "tra-ordinary-distance"):
        torch.manual_seed(5)
        starts[name] = {**MECHANISMS[name](16, 2).state_dict(), "next draw": torch.rand(3)}
    assert torch.equal(starts["tra-learned"].pop("threshold_bias"), torch.zeros(2))
    for state in starts.values():
        assert all(torch.equal(state[key], starts["tra"][key]) for key in state)


@torch.no_grad()
def test_tolerance_threshold_and_implementation_reach_the_operator() -> None:
    def build(**options: Any) -> Attention:
        torch.manual_seed(0)
        return MECHANISMS["tra"](16, 2, gate_bias=-1.0, **options).eval()

    x = torch.randn(1, 200, 16)
    exact, coarse, strict = build(tolerance=0.0), build(tolerance=1.0), build(tolerance=0.0, threshold=0.25)
    assert not torch.equal(coarse(x), exact(x))
    assert torch.equal(coarse.weights(x), exact.weights(x)), "weights are always exact"
    kept = exact.weights(x[:, :20]) > 0
    assert (strict.weights(x[:, :20]) > 0).sum() < kept.sum()
    kernel = build(impl="cpu").double()
    with pytest.raises(ValueError, match="impl 'cpu' computes in float32"):
        kernel(x.double())
    assert kernel.weights(x.double()).dtype == torch.float64, "by the reference"
