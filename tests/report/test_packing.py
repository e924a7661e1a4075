"""What a page holds of a layer, and what is refused; what it shows of it is tested in a browser."""

import pytest
import torch
from torch import Tensor

from tra.attention import MECHANISMS, Attention, Context, RotaryAttention
from tra.model import Decoder, DecoderConfig
from tra.report import explore, explorer, packing
from tra.report.inspection import read_layer
from tra.report.packing import Arrays, PackedLayer, pack_layer, small_maps


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every text is long enough for the page to compute weights."""
    monkeypatch.setattr(packing, "MOST_WEIGHTS", 0)


def packed(attention: Attention, length: int = 19) -> PackedLayer:
    torch.manual_seed(5)
    layer = read_layer(0, attention.eval(), torch.randn(1, length, attention.width))
    return pack_layer(layer, attention.heads, Arrays())


class Halved(RotaryAttention):
    """A rule that does more than what it calls."""

    def attend(self, x: Tensor, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        return super().attend(x, query, key, value, context) / 2


def test_weights_of_a_short_text_are_stored_and_those_of_a_long_one_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MOST_WEIGHTS", 2 * 19 * 20 // 2)
    assert packed(RotaryAttention(16, 2), 19).weights.length == 2 * 19 * 20 // 2
    assert packed(RotaryAttention(16, 2), 20).weights is None


@pytest.mark.usefixtures("long")
def test_weights_are_stored_where_they_do_not_follow_from_what_the_rule_called() -> None:
    assert packed(RotaryAttention(16, 2)).weights is None
    own = packed(Halved(16, 2))
    assert own.weights.length == 2 * 19 * 20 // 2
    assert own.query is not None, "scores are shown all the same"


@pytest.mark.parametrize("attention", MECHANISMS)
def test_a_mechanism_leaves_its_terms_with_who_asks(attention: str) -> None:
    module, terms = MECHANISMS[attention](16, 2).eval(), []
    module.weights(torch.randn(1, 7, 16), Context(terms=terms))
    assert len(terms) == (2 if attention == "differential" else 1)
    for found in terms:
        width = 4 if attention == "differential" else 8
        assert found.query.shape == found.key.shape == (1, 2, 7, width)
        assert found.scale == pytest.approx(width**-0.5)


@pytest.mark.usefixtures("long")
@pytest.mark.parametrize("kind", ["head", "query"])
def test_learned_thresholds_are_stored_in_place_of_the_weights(kind: str) -> None:
    attention = MECHANISMS["tra-learned"](24, 3, threshold=kind)
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    found = packed(attention)
    assert found.weights is None
    assert found.threshold.length == 3 * 19


@pytest.mark.usefixtures("long")
def test_a_page_says_how_far_its_weights_may_be_off() -> None:
    torch.manual_seed(2)
    assert 0 < packed(MECHANISMS["tra"](24, 3), 99).error < 1e-5


def test_a_small_map_shows_the_greatest_weight_of_each_part_and_0_where_all_is_0() -> None:
    weights = torch.zeros(1, 130, 130)
    weights[0, 129, 3] = -1.0
    weights[0, 100, 50] = 1e-30
    found = small_maps(weights)[0]
    assert found.shape == (64, 64)
    assert int(found[63, 1]) == 255
    assert int(found.max()) == 255
    assert 1 in found
    assert int((found > 0).sum()) <= 8
    assert small_maps(torch.tensor([[[1.0, 0.0], [1e-4, 1e-2]]])).tolist() == [[[255, 0], [1, 128]]]


@pytest.mark.usefixtures("long")
def test_a_text_that_makes_too_large_a_page_is_refused_with_what_would_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "MOST_NUMBERS", 3200)
    models = {name: Decoder(DecoderConfig(11, 1, 2, 16, attention=name)).eval() for name in ("rope", "stick-breaking")}

    def of(name: str, length: int) -> None:
        explore({name: models[name]}, torch.zeros(length, dtype=torch.long), ["a"] * length)

    of("rope", 100)
    with pytest.raises(ValueError, match="text must have at most 100 tokens here, got 101"):
        of("rope", 101)
    of("stick-breaking", 56)
    with pytest.raises(ValueError, match=r"text must have at most 56 tokens here, because .*, got 57"):
        of("stick-breaking", 57)


def test_what_cannot_be_explored_is_named() -> None:
    model = Decoder(DecoderConfig(11, 1, 2, 16)).eval()
    tokens = torch.zeros(3, dtype=torch.long)
    with pytest.raises(ValueError, match="symbols must be one for each of at least one token, got 2 for 3"):
        explore({"tra": model}, tokens, ["a", "b"])
    with pytest.raises(ValueError, match="models must be one or two, got 3"):
        explore(dict.fromkeys("abc", model), tokens, list("abc"))
    with pytest.raises(ValueError, match="runs must be one or two, got 0"):
        explorer()
    with torch.no_grad():
        model.embedding.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="model must have finite attention weights, those of layer 1 are not"):
        explore({"tra": model}, tokens, ["a", "b", "c"])
