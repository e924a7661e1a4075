"""Evaluation and prompts that several processes share give what one process gives."""

import json
from pathlib import Path

import pytest
import torch
from accelerate import ParallelismConfig
from safetensors.torch import load_file

from tests.distributed.processes import run
from tests.language_run import text_recipe, write_text
from tests.runs.tiny import launched
from tra.generation import Sampling
from tra.hub.generation import generate, load
from tra.hub.parallel import shard_batch
from tra.model import Decoder, DecoderConfig
from tra.runs import evaluate, train

TORCHRUN = ["torch.distributed.run", "--standalone"]
LENGTHS = (30, 130, 600)
IN_ROUNDS = "tra.runs.evaluation.TOKENS_PER_PIECE = 70\n"
COMMAND = """
import contextlib, os, sys
from tra.cli import main
with open(f"{sys.argv[1]}-{os.environ['RANK']}", "w") as out, contextlib.redirect_stdout(out):
    assert main(sys.argv[2:]) == 0
"""
"""A command of each process, whose output goes to a file of its own."""


def test_evaluation_by_groups_that_share_sequences(language_run: Path, tmp_path: Path) -> None:
    """2 groups of 2 processes take turns at batches; lengths below and above that of one piece."""
    (tmp_path / "program.py").write_text(COMMAND)
    launched(
        [*TORCHRUN, "--nproc-per-node=4"],
        *(str(tmp_path / "program.py"), str(tmp_path / "out"), "evaluate", str(language_run), "--examples", "3"),
        *("--lengths", *map(str, LENGTHS), "--context-parallel", "2", "--json"),
    )
    found = json.loads((tmp_path / "out-0").read_text())["results"]
    expected = evaluate(language_run, lengths=LENGTHS, examples=3)
    assert len(found) == len(expected) == 3
    for one, other in zip(found, expected, strict=True):
        theirs = other.to_dict()
        assert one.keys() == theirs.keys()
        for name, value in theirs.items():
            # Attention has the same bits; matrix products may round differently for other shapes.
            assert one[name] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), name
    assert (tmp_path / "out-1").read_text() == ""


def test_evaluation_of_a_mechanism_that_reads_all_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In rounds, because it would hold the scores of all rows otherwise; the last pieces are shorter."""
    monkeypatch.setenv("TRA_CACHE", str(tmp_path / "cache"))
    folder = train(text_recipe(write_text(tmp_path / "text"), "rope+tra"), tmp_path / "run").folder
    (tmp_path / "program.py").write_text(f"import tra.runs.evaluation\n{IN_ROUNDS}{COMMAND}")
    launched(
        [*TORCHRUN, "--nproc-per-node=2"],
        *(str(tmp_path / "program.py"), str(tmp_path / "out"), "evaluate", str(folder), "--examples", "3"),
        *("--lengths", *map(str, LENGTHS), "--context-parallel", "2", "--json"),
    )
    found = json.loads((tmp_path / "out-0").read_text())["results"]
    for one, other in zip(found, evaluate(folder, lengths=LENGTHS, examples=3), strict=True):
        for name, value in other.to_dict().items():  # losses by position are rounded to 6 digits
            near = isinstance(value, float | list)
            assert one[name] == (pytest.approx(value, rel=1e-6, abs=2e-6) if near else value), name


def test_too_many_processes_for_a_run_are_refused(language_run: Path) -> None:
    with pytest.raises(ValueError, match="context_parallel must divide the number of processes, 1, got 2"):
        evaluate(language_run, context_parallel=2)


PROMPT = """
import tra.model
from safetensors.torch import save_file
from tests.distributed.test_reading import config, packed, prompt
from tra.distributed import ContextParallel, context_parallel
from tra.hub.generation import generate, load
from tra.hub.parallel import shard_batch
from tra.model import Decoder
shards = ContextParallel(timeout=200, chunk=16)
tra.model.READ_AT_ONCE = 20  # what reads all keys reads in rounds
for attention, options in config():
    torch.manual_seed(0)
    model = Decoder(options).eval()
    tokens, mask = prompt()
    cache = model.new_cache()
    with context_parallel(shards), torch.inference_mode():
        scores = model.reader(cache)(tokens, mask)
        written = model.generate(tokens, 12, key_mask=mask)
        assert len(cache[0]) == tokens.shape[1]
        weights = model.attention_weights(shards.shard(tokens), key_mask=shards.shard(mask))[1]
    save_file({"scores": scores, "written": written, "key": cache[1].stored[0].contiguous(), "weights": weights},
              folder / f"{attention}-{rank}.safetensors")
model, tokenizer = load(Path(sys.argv[4]))
with context_parallel(shards):
    print(generate(model, tokenizer, "The river rises in the hills", 12)["text"])
    try:
        model.generate(torch.zeros(1, 4, dtype=torch.long), max_new_tokens=2)
    except ValueError as error:
        print(error)
batch = packed(model.config.vocab_size)
with context_parallel(shards):
    for name, given in (("plain", {}), ("packed", {"segment_ids": batch.pop("segment_ids")})):
        model.zero_grad()
        out = model(**shard_batch(shards, batch | given))
        assert out.past_key_values is None
        out.loss.backward()
        found = {"loss": out.loss.detach(), "gate": model.model.decoder.blocks[0].attention.gate.weight.grad}
        save_file(found, folder / f"{name}-{rank}.safetensors")
    try:
        model(torch.zeros(1, 4, dtype=torch.long), position_ids=torch.tensor([[0, 1, 0, 1]]))
    except ValueError as error:
        print(error)
dist.barrier()
"""


def packed(vocabulary: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(vocabulary, (2, 61), generator=torch.Generator().manual_seed(2))
    segments = torch.arange(61)[None] // torch.tensor([[17], [40]])
    return {"input_ids": tokens, "labels": tokens.masked_fill(tokens % 5 == 0, -100), "segment_ids": segments}


def config() -> list[tuple[str, DecoderConfig]]:
    given = {"vocabulary": 11, "layers": 2, "heads": 2, "width": 16}
    without = DecoderConfig(**given, attention_options={"qk_norm": False})
    others = [(name, DecoderConfig(**given, attention=name)) for name in ("rope", "rope+tra", "fot")]
    return [("tra", DecoderConfig(**given)), ("norms", without), *others]


def prompt() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(11, (2, 90), generator=torch.Generator().manual_seed(1))
    return tokens, torch.arange(90).expand(2, 90) >= torch.tensor([[0], [37]])


def test_a_prompt_that_processes_read_together_and_a_batch_that_they_share(language_run: Path, tmp_path: Path) -> None:
    outputs = run(PROMPT, 2, tmp_path, str(language_run))
    for attention, options in config():
        torch.manual_seed(0)
        model = Decoder(options).eval()
        tokens, mask = prompt()
        cache = model.new_cache()
        with torch.inference_mode():
            scores, written = model.reader(cache)(tokens, mask), model.generate(tokens, 12, key_mask=mask)
        parts = [load_file(tmp_path / f"{attention}-{rank}.safetensors") for rank in range(2)]
        for part in parts:
            assert torch.equal(part["written"], written)
            assert torch.equal(part["scores"], parts[0]["scores"])
            torch.testing.assert_close(part["scores"], scores)
            torch.testing.assert_close(part["key"], cache[1].stored[0])
        whole = model.attention_weights(tokens, key_mask=mask)[1].detach()
        for part, (begin, end) in zip(parts, ((0, 45), (45, 90)), strict=True):
            torch.testing.assert_close(part["weights"], whole[:, :, begin:end, :end])
    expected = generate(*load(language_run), "The river rises in the hills", 12)["text"]
    for out in outputs:
        *text, generates, packs = out.splitlines()
        assert "\n".join(text) == expected.rstrip("\n")
        assert "generate must be called outside of context_parallel" in generates
        assert "segment_ids must be given for packed documents" in packs
    model, _ = load(language_run)
    batch = packed(model.config.vocab_size)
    for name, given in (("plain", {}), ("packed", {"segment_ids": batch.pop("segment_ids")})):
        model.zero_grad()
        loss = model(**batch, **given).loss
        loss.backward()
        parts = [load_file(tmp_path / f"{name}-{rank}.safetensors") for rank in range(2)]
        torch.testing.assert_close(parts[0]["loss"] + parts[1]["loss"], loss.detach())
        gradient = model.model.decoder.blocks[0].attention.gate.weight.grad
        torch.testing.assert_close(parts[0]["gate"] + parts[1]["gate"], gradient)


def test_accelerates_context_parallelism_is_refused_by_transformers(language_run: Path) -> None:
    """Trainer gives it to attention through SDPA only, which ours is not: nothing is computed wrongly in silence."""
    assert load(language_run)[0].config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="cp_backend must be one of"):
        ParallelismConfig(cp_size=2, cp_backend="tra")


def test_what_cannot_be_divided_is_named() -> None:
    with pytest.raises(ValueError, match="position_ids cannot be divided among processes"):
        shard_batch(None, {"position_ids": torch.zeros(1, 3)})  # type: ignore[arg-type]


def test_the_command_reads_a_prompt_together(language_run: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(COMMAND)
    prompt = "The river rises in the hills"
    launched(
        [*TORCHRUN, "--nproc-per-node=2"],
        *(str(tmp_path / "program.py"), str(tmp_path / "out"), "generate", str(language_run), "--prompt", prompt),
        *("--tokens", "8", "--context-parallel", "2", "--save-cache", str(tmp_path / "cache.safetensors")),
    )
    expected = generate(*load(language_run), prompt, 8, Sampling(1.0))["text"]
    assert (tmp_path / "out-0").read_text() == f"{prompt}{expected}\n"
    assert (tmp_path / "out-1").read_text() == ""
    assert (tmp_path / "cache.safetensors").exists()
