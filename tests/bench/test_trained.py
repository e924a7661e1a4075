"""The operator on what a trained model computes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.language_run import train_on_text
from tests.runs.tiny import TINY
from tra.bench import BenchRequest, run_benchmarks, trained
from tra.bench.cases import Case
from tra.generation import Reader
from tra.model import Decoder, DecoderConfig
from tra.runs import Run, load_run, train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return load_run(train_on_text(tmp_path_factory.mktemp("trained")))


def case_of(run: Run, what: str, length: int) -> Case:
    (found,) = (case for case in trained.trained_cases(run, [length]) if what in case.what)
    return found


@torch.no_grad()
def test_attention_is_timed_on_what_the_model_itself_mixes(run: Run) -> None:
    """From the operator's results through the rest of each layer to what the model computes."""
    tokens = trained.own_tokens(run, 63)
    streams: list[torch.Tensor] = []
    hidden = run.model.hidden_from(run.model.embedded(tokens), streams=streams)
    for block, x, after, mixed in zip(
        run.model.blocks,
        streams,
        [*streams[1:], None],
        case_of(run, "forward", 63).ours()(),
        strict=True,
    ):
        normed = block.attention_norm(x)
        middle = normed + block.attention.output(mixed.transpose(1, 2).flatten(2))
        normed = block.mlp_norm(middle)
        out = normed + block.mlp(normed)
        torch.testing.assert_close(run.model.norm(out) if after is None else out, hidden if after is None else after)


def test_a_token_alone_is_the_last_of_all(run: Run) -> None:
    whole = case_of(run, "forward", 63).ours()()
    alone = case_of(run, "decode", 63).ours()()
    assert len(whole) == len(alone) == case_of(run, "decode", 63).repeats == 2
    for every, last in zip(whole, alone, strict=True):
        assert torch.equal(every[:, :, -1:], last)


def test_sdpa_gets_the_first_layers_queries_keys_and_values(run: Run) -> None:
    first = trained.layers_of(run.model, trained.own_tokens(run, 63))[0]
    expected = F.scaled_dot_product_attention(first.query, first.key, first.value, is_causal=True)
    assert torch.equal(case_of(run, "forward", 63).others["SDPA"]()(), expected)
    torch.testing.assert_close(case_of(run, "decode", 63).others["SDPA"]()(), expected[:, :, -1:])


def test_a_new_token_stands_behind_the_runs_own_text_always_at_the_same_place(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, out = Decoder.reader, []

    def kept(self: Decoder, *arguments: object) -> Reader:
        read = reader(self, *arguments)
        return lambda *given: out.append(read(*given))

    monkeypatch.setattr(Decoder, "reader", kept)
    tokens = trained.own_tokens(run, 40)
    work = case_of(run, "new token", 40).ours()
    work()
    work()
    with torch.no_grad():
        expected = run.model(torch.cat([tokens, tokens[:, -1:]], dim=1))[:, -1]
    assert len(out) == 2
    for logits in out:
        torch.testing.assert_close(logits, expected)


def test_rope_has_the_same_sizes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[DecoderConfig, int]] = []
    monkeypatch.setattr(trained, "new_token", lambda config, cached: made.append((config, cached)))
    case_of(run, "new token", 40).others["RoPE on SDPA"]()
    ((config, cached),) = made
    assert (config.attention, config.attention_options, cached) == ("rope", {}, 40)
    sizes = ("vocabulary", "layers", "heads", "width", "kv_heads")
    assert all(getattr(config, name) == getattr(run.recipe.model, name) for name in sizes)


def test_what_is_measured_of_a_run_is_written(run: Run, tmp_path: Path) -> None:
    content = run_benchmarks(BenchRequest(run.folder, (16, 63), tmp_path / "out", 0.01))
    assert json.loads((tmp_path / "out" / "bench.json").read_text()) == content
    assert [(row["what"], row["shape"], row["against"]) for row in content["rows"]] == [
        (what, shape.format(length), against)
        for length in (16, 63)
        for what, shape, against in (
            ("forward, a trained model's own", "1x2x{}", "SDPA"),
            ("decode one token, a trained model's own", "1x2x{}", "SDPA"),
            ("new token of the trained model", "1x{}", "RoPE on SDPA"),
        )
    ]
    quantiles = list(content["gates"]["quantiles of -log_gate"].values())
    assert quantiles == sorted(quantiles)
    assert quantiles[0] > 0


def test_what_cannot_be_measured_is_named(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lengths must be at most the \d+ tokens of valid, got 9999"):
        run_benchmarks(BenchRequest(run.folder, (9999,), tmp_path))
    with pytest.raises(ValueError, match="lengths must be at least 2, got 1"):
        BenchRequest(run.folder, (1,))
    rope = DecoderConfig(vocabulary=6, layers=1, heads=2, width=8, attention="rope")
    other = train(replace(TINY, model=rope, steps=1), tmp_path / "rope")
    with pytest.raises(ValueError, match=r"run must be of a mechanism .* such as tra, got rope"):
        run_benchmarks(BenchRequest(other.folder, folder=tmp_path))
