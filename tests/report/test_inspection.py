"""Summaries of heads against numbers worked out by hand and a plain loop; heatmaps of a language model."""

import json
from pathlib import Path

import matplotlib.image
import pytest
import torch
from matplotlib.figure import Figure
from torch.testing import assert_close

from tra.attention import MECHANISMS
from tra.cli import main
from tra.model import Decoder, DecoderConfig
from tra.report.inspection import heads_table, inspect_heads, summarise, write_inspection
from tra.runs import load_run


def test_numbers_of_a_head_worked_out_by_hand() -> None:
    """Four queries: nothing; the key before it; itself; a half each on itself and on the key three back."""
    weights = torch.zeros(4, 4)
    weights[1, 0] = weights[2, 2] = 1.0
    weights[3, 0] = weights[3, 3] = 0.5
    head = summarise(0, 1, weights, torch.tensor([0.0, 0.5, 1.0]))
    assert (head.layer, head.head) == (1, 2)
    assert head.kept == 4 / 10
    assert head.null == 1 / 4
    assert_close(head.mean_distance, (1 + 0 + 1.5) / 3, rtol=1e-6, atol=0.0)
    assert head.reach == 2, "reaches are 2, 1 and 4"
    assert head.gate == pytest.approx((0.1, 0.5, 0.9))


def test_reach_holds_nine_tenths_of_the_weight() -> None:
    weights = torch.zeros(10, 10)
    weights[9] = torch.tensor([0.05, 0.04, 0.01] + [0.0] * 3 + [0.3, 0.2, 0.3, 0.1])
    assert summarise(0, 0, weights, None).reach == 4
    weights[9, 6], weights[9, 2] = 0.29, 0.02
    assert summarise(0, 0, weights, None).reach == 8


def test_a_head_that_attends_to_nothing_has_no_reach() -> None:
    head = summarise(0, 0, torch.zeros(5, 5), None)
    assert (head.kept, head.null, head.mean_distance, head.reach, head.gate) == (0.0, 1.0, 0.0, 0, None)
    assert heads_table([head]).markdown().splitlines()[-1] == "| 1 | 1 | 0% | 100% | 0.0 | 0 |  |"


@pytest.mark.parametrize("attention", MECHANISMS)
def test_every_mechanism_can_be_inspected(attention: str) -> None:
    model = Decoder(DecoderConfig(vocabulary=7, layers=2, heads=2, width=16, attention=attention)).eval()
    tokens = torch.randint(7, (23,))
    heads, weights = inspect_heads(model, tokens)
    assert [(head.layer, head.head) for head in heads] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    for head, matrix in zip(heads, torch.cat(weights), strict=True):
        seen = sum(matrix[i, j] != 0 for i in range(23) for j in range(i + 1))
        assert head.kept == pytest.approx(float(seen) / (23 * 24 / 2))
        total = [sum(abs(float(w)) for w in row) for row in matrix]
        back = [sum(abs(float(matrix[i, j])) * (i - j) for j in range(23)) / total[i] for i in range(23) if total[i]]
        assert head.mean_distance == pytest.approx(sum(back) / len(back), rel=1e-4)
    if attention in ("tra", "rope"):
        assert all((head.kept < 1.0) == (attention == "tra") for head in heads)


def test_gates_are_those_the_mechanism_reads() -> None:
    model = Decoder(DecoderConfig(vocabulary=7, layers=1, heads=2, width=16)).eval()
    tokens = torch.randint(7, (50,))
    heads, _ = inspect_heads(model, tokens)
    block = model.blocks[0]
    gates = block.attention.log_gate(block.attention_norm(model.embedding(tokens[None])))[0].exp()
    for head, own in zip(heads, gates, strict=True):
        assert head.gate is not None
        assert head.gate[1] == pytest.approx(own.quantile(0.5).item(), rel=1e-5)


def test_inspect_draws_a_language_model_with_its_tokens(
    language_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = "The river flooded the hills ."
    assert main(["inspect", str(language_run), "--text", text, "--output", str(tmp_path / "out"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert "".join(shown["tokens"]) == text
    assert len(shown["heads"]) == 4
    assert shown == json.loads((tmp_path / "out" / "heads.json").read_text())
    image = matplotlib.image.imread(tmp_path / "out" / "attention.png")
    assert image.shape[0] > 500
    assert image[..., :3].reshape(-1, 3).std(axis=0).max() > 0.1
    assert main(["inspect", str(language_run), "--text", text]) == 0
    out = capsys.readouterr().out
    assert (language_run / "inspection" / "heads.md").read_text() in out


def test_inspect_reads_a_file_and_refuses_what_could_not_be_drawn(
    language_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.txt").write_text("The river")
    (tmp_path / "long.txt").write_text("The river rises . " * 100)
    command = ["inspect", str(language_run), "--output", str(tmp_path / "out"), "--json", "--text"]
    assert main([*command, f"@{tmp_path / 'long.txt'}"]) == 2
    assert "text must have at most 256 tokens to be drawn, got" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main([*command, f"@{tmp_path / 'short.txt'}"]) == 0
    assert "".join(json.loads(capsys.readouterr().out)["tokens"]) == "The river"


def test_without_a_text_a_sequence_of_the_task_is_drawn_and_an_empty_one_is_refused(
    language_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["inspect", str(language_run), "--output", str(tmp_path), "--json"]
    assert main([*command, "--length", "11"]) == 0
    tokens, symbols = load_run(language_run).task.example(11)
    assert json.loads(capsys.readouterr().out)["tokens"] == symbols
    assert len(tokens) == len(symbols)
    assert main([*command, "--text", ""]) == 2
    assert "text must have at least one token, got ''" in capsys.readouterr().err


def test_a_figure_in_every_format_and_no_other(tmp_path: Path) -> None:
    model = Decoder(DecoderConfig(vocabulary=7, layers=1, heads=1, width=8, attention="rope")).eval()
    tokens, symbols = torch.arange(5), list("abcde")
    with pytest.raises(ValueError, match=r"figures must be one of pdf, png, svg, got 'gif'"):
        write_inspection(model, tokens, symbols, tmp_path / "out", ("gif",))
    assert not (tmp_path / "out").exists()
    found = write_inspection(model, tokens, symbols, tmp_path / "out", ("svg", "pdf"))
    assert found.attention == "rope"
    made = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert made == ["attention.pdf", "attention.svg", "heads.json", "heads.md"]


def test_the_label_says_the_options_of_the_mechanism(tmp_path: Path, drawn: list[Figure]) -> None:
    config = DecoderConfig(
        vocabulary=7, layers=1, heads=1, width=8, attention="rope", attention_options={"theta": 10_000}
    )
    found = write_inspection(Decoder(config).eval(), torch.arange(5), list("abcde"), tmp_path)
    assert found.attention == "rope theta=10000"
    assert drawn[0].axes[0].get_title() == "rope theta=10000, layer 1, head 1"
