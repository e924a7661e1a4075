"""Text from a trained model, shown as it comes."""

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LogitsProcessorList, PreTrainedTokenizerBase, TextStreamer
from transformers.utils import logging

from tra.environment import best_device
from tra.errors import RunError
from tra.files import opened, read_json
from tra.hub.config import TraConfig
from tra.hub.export import as_pretrained
from tra.hub.modeling import TraForCausalLM
from tra.runs import Run
from tra.text.growth import check_declared
from tra.text.tokenizer import encoded, panics_caught


def load(folder: Path) -> tuple[TraForCausalLM, PreTrainedTokenizerBase]:
    """Model and tokenizer of a run or of an exported folder. Runs no code that the folder holds."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # what is wrong is said in one line
    run = Run(folder)
    if run.exists:
        model, tokenizer = as_pretrained(run)
        if tokenizer is None:
            raise ValueError(f"run must be one on text, which has a tokenizer; {folder} was trained on a task")
        return model, tokenizer
    if not (folder / "config.json").exists():
        raise ValueError(f"run must be a folder that holds recipe.json (a run) or config.json (exported), got {folder}")
    if not (folder / "tokenizer.json").exists():
        raise ValueError(f"run must have a tokenizer, but {folder} holds no tokenizer.json")
    try:
        for path in folder.iterdir():
            if not path.is_dir():
                opened(path).close()  # what is no regular file would keep transformers waiting
        check_declared((folder / "tokenizer.json").read_bytes())
        kind = read_json(folder / "config.json").get("model_type")
        if kind != TraConfig.model_type:
            raise ValueError(f"the model is one of type {kind!r}, not of this package")
        exported, found = TraForCausalLM.from_pretrained(folder, output_loading_info=True)
        if unlike := sorted(found["missing_keys"] | found["unexpected_keys"]):
            raise ValueError(f"config.json and the weights do not belong together: {unlike[0]} is in one only")
        with panics_caught():
            its_tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # what is damaged raises many kinds
        raise RunError(f"could not load {folder}: {(str(error).splitlines() or [''])[0]}") from error
    return exported.to(best_device()).eval(), its_tokenizer


def generate(
    model: Any, tokenizer: PreTrainedTokenizerBase, prompt: str, seed: int, stream: bool, **options: Any
) -> dict[str, Any]:
    """Continue a prompt, printing the text as it comes if asked to; ``options`` are those of `model.generate`.

    Returns the text and how fast it came: the prompt is read at once, then one token follows another. Beam search is
    timed as a whole.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        encoded(backend, prompt)  # says what is wrong with a tokenizer from elsewhere
    with _explained():
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]  # as in training
    if ids.shape[1] == 0:
        raise ValueError(f"prompt must have at least one token, got {prompt!r}")
    if not -(1 << 63) <= seed < 1 << 64:
        raise ValueError(f"seed must be a whole number of 64 bits, got {seed}")
    torch.manual_seed(seed)
    # Beam search changes its mind about earlier tokens, so it cannot be followed.
    clock = _Clock(tokenizer, show=stream) if options.get("num_beams", 1) == 1 else None
    mask = torch.ones_like(ids).to(model.device)
    began = time.perf_counter()
    checks = LogitsProcessorList([_check_scores])
    with _explained():
        out = model.generate(
            ids.to(model.device), attention_mask=mask, streamer=clock, logits_processor=checks, **options
        )
    ended = time.perf_counter()
    new = out.shape[1] - ids.shape[1]
    one_by_one = (new - 1) / (ended - clock.first) if clock and new > 1 else None
    return {
        "prompt": prompt,
        "text": tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True),
        "prompt_tokens": ids.shape[1],
        "new_tokens": new,
        "prompt_seconds": clock.first - began if clock else None,
        "tokens_per_second": one_by_one if clock else new / (ended - began),
    }


@contextmanager
def _explained() -> Iterator[None]:
    """Where a folder's generation_config.json or tokenizer_config.json says what cannot be, transformers raises errors
    of any kind."""
    try:
        yield
    except (OSError, RunError, ValueError):
        raise
    except Exception as error:
        raise RunError(f"the prompt could not be continued: {(str(error).splitlines() or [''])[0]}") from error


def _check_scores(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Raise a RunError for scores among which nothing can be chosen."""
    if not bool((scores < math.inf).all()):
        raise RunError(f"the model's scores for token {ids.shape[1] + 1} are not finite: its weights are damaged")
    return scores


class _Clock(TextStreamer):
    """Prints words as they are finished, and notes when the first new token came."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, show: bool) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.show, self.first, self.calls = show, 0.0, 0

    def put(self, value: torch.Tensor) -> None:
        self.calls += 1  # the first call brings the prompt
        if self.calls == 2:
            self.first = time.perf_counter()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if self.show:
            sys.stdout.write(text + ("\n" if stream_end else ""))
            sys.stdout.flush()
