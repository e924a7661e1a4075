import math
from pathlib import Path

import pytest
import torch

from tra.tasks import Batch, Evaluation, FlipFlop

SETS = {"iid": 0.8, "sparse": 0.98, "dense": 0.1}


def draw(ignore: float = 0.8, batch: int = 500, length: int = 64, seed: int = 0) -> Batch:
    return FlipFlop(ignore).sample(torch.Generator().manual_seed(seed), batch, length)


def solve(text: str) -> list[int]:
    """Positions that count, checking on the way that the string is a flip-flop string."""
    written, counted = None, []
    for position in range(0, len(text), 2):
        instruction, bit = text[position], text[position + 1]
        assert instruction in "wri"
        assert bit in "01"
        if instruction == "w":
            written = bit
        if instruction == "r":
            assert bit == written
            counted.append(position + 1)
    return counted


@pytest.mark.parametrize("ignore", [0.0, 0.1, 0.8, 0.98, 1.0])
@pytest.mark.parametrize("length", [4, 6, 64, 511 + 1])
def test_every_read_repeats_the_last_write_and_counts(ignore: float, length: int) -> None:
    batch = draw(ignore, batch=100, length=length)
    assert batch.tokens.shape == batch.counted.shape == (100, length)
    for tokens, counted in zip(batch.tokens, batch.counted, strict=True):
        text = FlipFlop().text(tokens)
        assert text[0] == "w"
        assert text[-2] == "r"
        assert counted.nonzero().flatten().tolist() == solve(text)


@pytest.mark.parametrize("name", sorted(SETS))
def test_number_of_reads_follows_the_formula(name: str) -> None:
    examples, length = 2000, 512
    batches = FlipFlop().evaluation_batches(Evaluation(name, length, examples), batch=64)
    reads = sum(int(batch.counted.sum()) for batch in batches)
    share = (1 - SETS[name]) / 2
    expected = examples * (254 * share + 1)
    assert abs(reads - expected) < 4 * math.sqrt(examples * 254 * share * (1 - share))


def test_instructions_and_bits_have_their_probabilities() -> None:
    batch = draw(0.7, batch=2000, length=66)
    instruction, bit = batch.tokens[:, 2:-2:2], batch.tokens[:, 1::2] - 3
    trials = instruction.numel()
    for token, probability in ((0, 0.15), (1, 0.15), (2, 0.7)):
        count = int((instruction == token).sum())
        assert abs(count - trials * probability) < 4 * math.sqrt(trials * probability * (1 - probability))
    for token in (0, 2):
        bits = bit[batch.tokens[:, 0::2] == token]
        assert abs(int(bits.sum()) - bits.numel() / 2) < 4 * math.sqrt(bits.numel()) / 2


def test_sample_depends_on_the_generator_alone() -> None:
    first = draw(seed=3)
    torch.manual_seed(99)
    torch.rand(7)
    assert torch.equal(draw(seed=3).tokens, first.tokens)
    assert not torch.equal(draw(seed=4).tokens, first.tokens)


def test_evaluation_sets_are_fixed_by_name_and_length() -> None:
    def whole(name: str, length: int, examples: int, batch: int) -> torch.Tensor:
        return torch.cat(
            [part.tokens for part in FlipFlop().evaluation_batches(Evaluation(name, length, examples), batch)]
        )

    first = whole("iid", 64, 150, 10)
    assert first.shape == (150, 64)
    assert torch.equal(whole("iid", 64, 200, 33)[:150], first)
    assert not torch.equal(whole("sparse", 64, 150, 10), first)
    assert len(first.unique(dim=0)) == 150
    # Published figures name these sets: if this fails, raise the task's version.
    assert FlipFlop().text(first[0]) == FIRST_IID_SEQUENCE


FIRST_IID_SEQUENCE = "w0r0i0i0r0i0i1r0w1i1i0i0i1i0i1r1i1i0i1i1i1i1i0i0i1i0i0i0w0i0i0r0"


@pytest.mark.parametrize("length", [2, 5, 0])
def test_wrong_length_is_named(length: int) -> None:
    with pytest.raises(ValueError, match=f"length must be an even number of tokens, at least 4, got {length}"):
        draw(length=length)


def test_wrong_set_probability_and_size_are_named() -> None:
    with pytest.raises(ValueError, match="evaluation set must be one of dense, iid, sparse, got 'spars'; did you mean"):
        next(FlipFlop().evaluation_batches(Evaluation("spars", 64, 1), 1))
    with pytest.raises(ValueError, match=r"ignore must be a probability in \[0, 1\], got 1.5"):
        FlipFlop(1.5)
    with pytest.raises(ValueError, match="examples must be at least 1, got 0"):
        next(FlipFlop().evaluation_batches(Evaluation("iid", 64, 0), 1))


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder laid out as the published copy: parquet files with a column of strings."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "flipflop" / "data"
    folder.mkdir(parents=True)
    for name, count in (("train", 30), ("val", 20), ("val_dense", 5), ("val_sparse", 7)):
        tokens = draw(batch=count, length=32, seed=count).tokens
        texts = [FlipFlop().text(row) for row in tokens]
        datasets.Dataset.from_dict({"text": texts}).to_parquet(folder / f"{name}-00000-of-00001-abc.parquet")
    return folder.parent


@pytest.mark.parametrize("split, count", [("train", 30), ("iid", 20), ("dense", 5), ("sparse", 7)])
def test_reads_the_published_copy_from_a_folder(published: Path, split: str, count: int) -> None:
    batch, expected = FlipFlop().published(split, published), draw(batch=count, length=32, seed=count)
    assert torch.equal(batch.tokens.long(), expected.tokens)
    assert torch.equal(batch.counted, expected.counted)
    assert batch.tokens.dtype == torch.uint8


def test_wrong_published_copy_is_named(published: Path, tmp_path: Path) -> None:
    import datasets

    with pytest.raises(ValueError, match=r"data must be a folder with train-.*parquet files, found none in"):
        FlipFlop().published("train", tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="split must be one of dense, iid, sparse, train, got 'trian'"):
        FlipFlop().published("trian", published)
    for texts, message in (
        (["w0r0", "w0i1r0"], "one length"),
        (["w0x0"], "strings over 'wri01'"),
        (["w0é0"], "strings"),
    ):
        path = tmp_path / texts[0] / "train-0.parquet"
        path.parent.mkdir()
        datasets.Dataset.from_dict({"text": texts}).to_parquet(path)
        with pytest.raises(ValueError, match=message):
            FlipFlop().published("train", path.parent)
