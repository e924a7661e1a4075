"""Perplexity, against loops written out in double precision."""

import copy
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tra.runs.evaluation
from tests.text.reading import prose, write_folder
from tra import Decoder, DecoderConfig
from tra.progress import shown
from tra.runs.evaluation import measure, measure_all, predict
from tra.tasks import Batch, Evaluation, Perplexity, Result
from tra.text import Text


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Text:
    """Of about 800 tokens to be measured on."""
    monkeypatch.setenv("TRA_CACHE", str(tmp_path / "cache"))
    folder = write_folder(tmp_path / "text", prose(1, 2000), prose(2, 400), "x" * 500)
    return Text(str(folder), None, "bpe-280")


class Table(Decoder):
    """Predicts by the last token alone, from a table of log-probabilities."""

    def __init__(self, log_probability: Tensor) -> None:
        super().__init__(DecoderConfig(vocabulary=len(log_probability), layers=1, heads=2, width=16))
        self.log_probability = log_probability

    def forward(self, tokens: Tensor, **_: object) -> Tensor:
        return self.log_probability[tokens]


def opinionated(attention: str, vocabulary: int = 280) -> Decoder:
    """A model whose predictions differ, and depend on what it read."""
    model = Decoder(DecoderConfig(vocabulary=vocabulary, layers=2, heads=2, width=16, attention=attention, dropout=0.3))
    with torch.no_grad():
        model.embedding.weight.mul_(100)
        model.head.weight.mul_(20)
    return model


def ids_of(task: Text, name: str = "valid") -> list[int]:
    return task.tokens(name).read().tolist()


@torch.no_grad()
def slowly(model: Decoder, ids: Sequence[int], windows: Sequence[tuple[int, int, int]]) -> SimpleNamespace:
    """Window by window in double precision. Each is its first token, its last, and how many of its end count."""
    model = copy.deepcopy(model).double().eval()
    losses, by_position = [], {}
    for first, last, new in windows:
        logits = model(torch.tensor([ids[first:last]]))[0]
        for position in range(last - first):
            if position >= last - first - new:
                loss = -logits[position].log_softmax(0)[ids[first + position + 1]].item()
                losses.append(loss)
                by_position.setdefault(max(position, 1).bit_length() - 1, []).append(loss)
    return SimpleNamespace(
        tokens=len(losses),
        loss=sum(losses) / len(losses),
        loss_by_position=[
            sum(found) / len(found) if (found := by_position.get(place)) else None
            for place in range(max(by_position) + 1)
        ],
    )


def side_by_side(count: int, length: int) -> list[tuple[int, int, int]]:
    ends = [0, *range(length, count - 1, length), count - 1]
    return [(done, last, last - done) for done, last in itertools.pairwise(ends)]


def sliding(count: int, length: int, stride: int) -> list[tuple[int, int, int]]:
    ends = [0, *range(length, count - 1, stride), count - 1]
    return [(max(0, last - length), last, last - done) for done, last in itertools.pairwise(ends)]


def assert_agrees(found: Result, expected: Result | SimpleNamespace) -> None:
    assert found.tokens == expected.tokens
    assert found.loss == pytest.approx(expected.loss, rel=1e-5)
    assert [place is None for place in found.loss_by_position] == [place is None for place in expected.loss_by_position]
    for one, other in zip(found.loss_by_position, expected.loss_by_position, strict=True):
        assert one == (other if other is None else pytest.approx(other, rel=1e-4))


@pytest.mark.parametrize("attention", ["tra", "rope"])
@pytest.mark.parametrize("length", [1, 7, 64, 600, 5000])
def test_perplexity_in_windows_side_by_side_is_that_of_a_slow_loop(text: Text, attention: str, length: int) -> None:
    """Windows of 600 are read in two pieces through the cache; the text is shorter than 5,000."""
    model, ids = opinionated(attention), ids_of(text)
    windows = side_by_side(len(ids), length)
    if length == 1:
        windows = windows[:90]
    found = measure(model, text, Evaluation("valid", length, 90 if length == 1 else None))
    assert_agrees(found, slowly(model, ids, windows))
    assert found.tokens == (90 if length == 1 else len(ids) - 1)
    assert (found.set, found.length, found.stride) == ("valid", length, None)
    assert model.training


@pytest.mark.parametrize("length, stride", [(7, 7), (64, 5), (64, 63), (600, 91), (5000, 100)])
def test_perplexity_in_sliding_windows_is_that_of_a_slow_loop(text: Text, length: int, stride: int) -> None:
    model, ids = opinionated("tra"), ids_of(text)
    found = measure(model, text, Evaluation("valid", length, None, stride))
    assert_agrees(found, slowly(model, ids, sliding(len(ids), length, stride)))
    assert found.tokens == len(ids) - 1


@pytest.mark.parametrize("stride", [None, 9])
def test_examples_measure_the_beginning_of_the_text(text: Text, stride: int | None) -> None:
    model, ids = opinionated("tra"), ids_of(text)[: 5 * 13 + 1]
    found = measure(model, text, Evaluation("valid", 13, 5, stride))
    windows = sliding(len(ids), 13, stride) if stride else side_by_side(len(ids), 13)
    assert_agrees(found, slowly(model, ids, windows))
    beginning = text.tokenizer.decode(ids)
    assert (found.words, found.bytes) == (len(beginning.split()), len(beginning.encode()))
    assert found.examples == 5


def test_perplexity_is_per_token_word_and_byte(text: Text) -> None:
    """All three say that the whole text has one probability."""
    found = measure(opinionated("tra"), text, Evaluation("valid", 32, None))
    content = Path(text.evaluation, "valid.txt").read_text()
    assert (found.words, found.bytes) == (len(content.split()), len(content))
    assert found.words < found.tokens < found.bytes
    total = found.loss * found.tokens
    for count, name in (("tokens", "perplexity"), ("words", "perplexity_per_word"), ("bytes", "perplexity_per_byte")):
        assert math.log(getattr(found, name)) * getattr(found, count) == pytest.approx(total, rel=1e-9)


def test_a_model_that_knows_nothing_has_the_vocabulary_as_perplexity(text: Text) -> None:
    model = opinionated("tra")
    nn.init.zeros_(model.head.weight)
    for evaluation in (Evaluation("valid", 31, None), Evaluation("valid", 31, None, 11), Evaluation("test", 600, None)):
        found = measure(model, text, evaluation)
        assert found.perplexity == pytest.approx(280, rel=1e-5)
        assert found.loss_by_position == pytest.approx([math.log(280)] * len(found.loss_by_position), rel=1e-5)


@pytest.mark.parametrize("stride", [None, 4])
@pytest.mark.parametrize("length", [5, 90])
def test_a_table_of_pairs_has_its_closed_form_in_any_window(text: Text, length: int, stride: int | None) -> None:
    table = torch.randn(280, 280, dtype=torch.float64).mul(2).log_softmax(dim=1)
    ids = torch.tensor(ids_of(text))
    expected = -table[ids[:-1], ids[1:]].mean().item()
    found = measure(Table(table), text, Evaluation("valid", length, None, stride))
    assert found.loss == pytest.approx(expected, rel=1e-6)
    assert found.perplexity == pytest.approx(math.exp(expected), rel=1e-6)


def test_the_right_answer_every_time_has_perplexity_one() -> None:
    batch = Batch(torch.tensor([[3, 1, 2, 0, 5], [4, 3, 1, 2, 0]]), torch.tensor([[False] + [True] * 4] * 2))
    table = torch.zeros(6, 6)
    table[batch.tokens[:, :-1].flatten(), batch.tokens[:, 1:].flatten()] = 9.0
    found = Perplexity.of(Evaluation("valid", 4, 2), predict(Table(table), [batch]), 2, 30)
    wrong = 5 * math.exp(-9)
    assert found.perplexity == pytest.approx(1 + wrong, rel=1e-6)
    assert found.perplexity_per_word == pytest.approx((1 + wrong) ** 4, rel=1e-6)
    assert found.perplexity_per_byte == pytest.approx((1 + wrong) ** (8 / 30), rel=1e-6)


@torch.no_grad()
def hugging_face_loop(model: Decoder, ids: Tensor, max_length: int, stride: int) -> float:
    """As in the guide "Perplexity of fixed-length models", with every token weighing the same."""
    summed, counted, previous_end = 0.0, 0, 0
    for begin in range(0, ids.shape[1], stride):
        end = min(begin + max_length, ids.shape[1])
        target_length = end - previous_end  # may differ from the stride in the last one
        inputs = ids[:, begin:end]
        targets = inputs.clone()
        targets[:, :-target_length] = -100
        logits, targets = model(inputs)[:, :-1].flatten(0, 1), targets[:, 1:].flatten()
        summed += F.cross_entropy(logits.double(), targets, ignore_index=-100, reduction="sum").item()
        counted += int((targets != -100).sum())
        previous_end = end
        if end == ids.shape[1]:
            break
    return math.exp(summed / counted)


@pytest.mark.parametrize("length, stride", [(16, 16), (48, 24), (48, 1), (33, 10)])
def test_sliding_windows_are_those_of_hugging_faces_loop(text: Text, length: int, stride: int) -> None:
    """A window of n predictions is one of n + 1 tokens there. Only a last one that does not fit is shorter there."""
    model, ids = opinionated("tra").eval(), torch.tensor([ids_of(text)])
    fitting = length + 1 + 5 * stride
    text._splits["valid"] = replace(text.tokens("valid"), count=fitting)
    found = measure(model, text, Evaluation("valid", length, None, stride))
    expected = hugging_face_loop(model, ids[:, :fitting], length + 1, stride)
    assert found.perplexity == pytest.approx(expected, rel=1e-5)


def test_text_read_piece_by_piece_equals_text_read_at_once(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    model, wanted = opinionated("tra"), [Evaluation("valid", 300, None), Evaluation("valid", 100, None, 37)]
    whole = [measure(model, text, evaluation) for evaluation in wanted]
    monkeypatch.setattr("tra.runs.evaluation.TOKENS_PER_PIECE", 23)
    for one, other in zip([measure(model, text, evaluation) for evaluation in wanted], whole, strict=True):
        assert_agrees(one, other)


@pytest.mark.parametrize("scores, piece", [(1 << 20, 512), (800 * 100, 100), (1, 64)])
def test_pieces_of_long_windows_hold_no_more_scores_than_allowed(
    scores: int, piece: int, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, wanted, lengths = opinionated("cope"), Evaluation("valid", 800, 1), []
    whole = measure(model, text, wanted)
    model.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    monkeypatch.setattr("tra.runs.evaluation.SCORES_PER_PIECE", scores)
    assert_agrees(measure(model, text, wanted), whole)
    assert max(lengths) == piece
    assert sum(lengths) == 800


def test_batches_hold_no_more_logits_than_allowed(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []

    class Watched(Table):
        def forward(self, tokens: Tensor, **options: object) -> Tensor:
            sizes.append(tokens.numel() * 280)
            return super().forward(tokens, **options)

    model = Watched(torch.zeros(280, 280))
    expected = measure(model, text, Evaluation("valid", 9, None))
    largest = max(sizes)
    sizes.clear()
    monkeypatch.setattr("tra.runs.evaluation.LOGITS_PER_BATCH", 280 * 30)
    assert_agrees(measure(model, text, Evaluation("valid", 9, None)), expected)
    assert max(sizes) == 280 * 27 < largest


def test_a_text_of_one_word_has_an_infinite_perplexity_per_word(text: Text) -> None:
    found = measure(Table(torch.zeros(280, 280)), text, Evaluation("test", 50, None))
    assert (found.words, found.bytes) == (1, 501)
    assert found.perplexity == pytest.approx(280)
    assert found.perplexity_per_word == math.inf
    assert found.perplexity_per_byte < 280


@pytest.mark.parametrize(
    "wrong, message",
    [
        (Evaluation("valid", 0, None), "length must be at least 1, got 0"),
        (Evaluation("valid", 8, None, 9), "stride must be between 1 and the window of 8, got 9"),
        (Evaluation("dev", 8, None), "evaluation set must be one of test, valid, got 'dev'"),
        (Evaluation("valid", 8, 0), "examples must be at least 1, got 0"),
    ],
)
def test_a_wrong_evaluation_is_refused_before_any_is_measured(
    wrong: Evaluation, message: str, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tra.runs.evaluation, "measure", None)
    with pytest.raises(ValueError, match=message):
        measure_all(opinionated("tra"), text, [Evaluation("valid", 8, 2), wrong], "tra")


def test_prints_perplexity_with_the_stride_of_sliding_windows(text: Text, capsys: pytest.CaptureFixture[str]) -> None:
    sets = [Evaluation("valid", 16, 2), Evaluation("valid", 16, 2, 4), Evaluation("valid", 32, 2)]
    with shown():
        results = measure_all(Table(torch.zeros(280, 280)), text, sets, "tra")
    lines = [line for line in capsys.readouterr().out.splitlines() if " tokens, perplexity per token:" in line]
    assert [result.stride for result in results] == [None, 4, None]
    assert lines == [
        "   tra at     16 tokens, perplexity per token:  valid 280.000  valid (stride 4) 280.000",
        "   tra at     32 tokens, perplexity per token:  valid 280.000",
    ]
