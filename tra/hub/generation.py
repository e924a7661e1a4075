"""Text from a trained model, shown as it comes."""

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoTokenizer, LogitsProcessorList, PreTrainedTokenizerBase
from transformers.utils import logging

from tra.attention.cache_file import check_place
from tra.distributed import context_parallel, current
from tra.environment import best_device
from tra.errors import RunError
from tra.files import opened, read_json
from tra.generation import GREEDY, Reader, Sampling, check_finite, stream_tokens
from tra.hub.cache import TraCache, TraLayer
from tra.hub.config import TraConfig
from tra.hub.export import as_pretrained
from tra.hub.modeling import TraForCausalLM
from tra.model import READ_AT_ONCE, split_tokens
from tra.runs.folder import find_run
from tra.text.tokenizer import encoded, panics_caught

KNOWN = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "_from_model_config", "use_cache"),
    *("output_attentions", "output_hidden_states"),
    *("do_sample", "temperature", "top_k", "top_p", "max_length", "max_new_tokens"),
}
"""What a generation_config.json may say without a word to the loop of this package: tokens that it is told, what has no
effect, and what the caller decides."""


def load(folder: Path) -> tuple[TraForCausalLM, PreTrainedTokenizerBase]:
    """Model and tokenizer of a run or of an exported folder. Runs no code that the folder holds."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # what is wrong is said in one line
    run = find_run(folder)
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
    model: TraForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    new: int,
    sampling: Sampling = GREEDY,
    *,
    beams: int = 1,
    seed: int = 0,
    show: Callable[[str], object] = lambda piece: None,
    cache: Path | None = None,
    save_cache: Path | None = None,
) -> dict[str, Any]:
    """Continue a prompt by at most ``new`` tokens, showing the text as it comes.

    Returns the text and how fast it came: the prompt is read at once, then one token follows another. What only
    transformers can do is shown at its end and timed as a whole: beam search, which changes its mind about earlier
    tokens, and whatever else a folder's generation_config.json asks for.

    The prompt follows what was read when `cache` was saved; `save_cache` stores all that is read now, the new text
    included.
    """
    ids = prompt_ids(tokenizer, prompt)
    check_seed(seed)
    if save_cache is not None:
        check_place(save_cache)
    began = time.perf_counter()
    by_transformers = beams > 1 or asks_for_more(model)
    past, earlier = None, None
    if cache is not None or save_cache is not None:
        if by_transformers:
            raise ValueError("cache and save_cache must be left out where transformers generates: beams and the like")
        past = TraCache(model.model.decoder)
        layers = [layer.stored for layer in past.layers if isinstance(layer, TraLayer)]
        known_by = tokenizer_fingerprint(tokenizer)
        if cache is not None:
            earlier = model.model.decoder.load_cache(cache, layers, known_by)[1]
    if by_transformers:
        tokens, first = _generated_by_transformers(model, ids, new, sampling, beams, seed), None
        text = str(tokenizer.decode(tokens, skip_special_tokens=True))
        show(text)
    else:
        tokens, text, first = [], "", None
        for token, piece in written(model, tokenizer, ids, new, sampling, seed, past):
            first = time.perf_counter() if first is None else first
            tokens += [] if token is None else [token]
            text += piece
            show(piece)
    ended = time.perf_counter()
    if save_cache is not None and past is not None:
        whole = [ids, torch.tensor([tokens], dtype=ids.dtype)]
        with torch.inference_mode():  # the last token was given, but not read
            reader(model, past)(whole[1][:, -1:].to(model.device), None)
        read = torch.cat([*([] if earlier is None else [earlier]), *whole], 1)
        model.model.decoder.save_cache(save_cache, layers, read, known_by)
    one_by_one = (len(tokens) - 1) / (ended - first) if first is not None and len(tokens) > 1 else None
    return {
        "prompt": prompt,
        "text": text,
        "prompt_tokens": ids.shape[1],
        "new_tokens": len(tokens),
        "prompt_seconds": None if first is None else first - began,
        "tokens_per_second": len(tokens) / (ended - began) if first is None else one_by_one,
    }


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> Tensor:
    """The tokens ``[1, L]`` of a prompt, with nothing added, as in training."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        encoded(backend, prompt)  # says what is wrong with a tokenizer from elsewhere
    with _explained():
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
    if ids.shape[1] == 0:
        raise ValueError(f"prompt must have at least one token, got {prompt!r}")
    return ids


def check_seed(seed: int) -> None:
    if not -(1 << 63) <= seed < 1 << 64:
        raise ValueError(f"seed must be a whole number of 64 bits, got {seed}")


def written(
    model: TraForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    ids: Tensor,
    new: int,
    sampling: Sampling,
    seed: int,
    past: transformers.Cache | None = None,
) -> Iterator[tuple[int | None, str]]:
    """The tokens that follow ``ids [1, L]``, each with the text that it completes, and None with what is left at the
    end, where bytes may stand that are no character.

    Nothing is shared between calls but the weights, so several may go on at the same time.
    """
    text = TextStream(tokenizer, int(ids[0, -1]))
    with _explained():
        for chosen in stream_tokens(
            reader(model, past),
            ids.to(model.device),
            new,
            sampling,
            end=end_tokens(model),
            generator=torch.Generator(model.device).manual_seed(seed),
        ):
            yield int(chosen), text.add(int(chosen))
        if rest := text.rest():
            yield None, rest


def end_tokens(model: TraForCausalLM) -> list[int]:
    """Those after which its text ends."""
    end = model.generation_config.eos_token_id
    return [] if end is None else end if isinstance(end, list) else [end]


class TextStream:
    """Text from tokens as they come.

    Args:
        tokenizer: what decodes them.
        before: the token before the first: some tokenizers drop a space with which a text begins.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, before: int) -> None:
        self.tokenizer = tokenizer
        # What was decoded last, and what was not yet: to decode everything again for each token would take ever longer.
        self.before, self.held = [before], list[int]()

    def add(self, token: int) -> str:
        """The text that this token completes: none while it ends within a character."""
        self.held.append(token)
        piece = self._added()
        if piece.endswith("\ufffd"):  # which stands for a part of a character
            return ""
        self.before, self.held = self.held, []
        return piece

    def rest(self) -> str:
        """What is left at the end, where bytes may stand that are no character."""
        return self._added() if self.held else ""

    def _added(self) -> str:
        """What the tokens held add to the text of those before, on which it may depend."""
        both = (self.before, self.before + self.held)
        known, text = (str(self.tokenizer.decode(ids, skip_special_tokens=True)) for ids in both)
        return text[len(known) :]


def reader(model: TraForCausalLM, past: transformers.Cache | None = None) -> Reader:
    """What reads tokens one call after another and scores the next one, by calling the model; `past` is what it has
    read before."""

    def read(tokens: Tensor, key_mask: Tensor | None) -> Tensor:
        nonlocal past
        if key_mask is not None:
            raise ValueError("key_mask must be None: one prompt is continued at a time")
        past = TraCache(model.model.decoder) if past is None else past
        shards = current()
        if shards is None:
            return read_here(tokens)
        if not past.get_seq_length() and tokens.shape[1] >= shards.size:
            for piece in model.model.decoder.split_rounds(shards, READ_AT_ONCE, tokens):
                mine = shards.shard(piece)
                out = model(input_ids=mine, past_key_values=past, logits_to_keep=1, return_dict=True)
            scores = out.logits[:, -1]
            return shards.exchange(scores.contiguous())[-1]  # of the last token, which the last process has
        with context_parallel(None):  # every process has read everything
            return read_here(tokens)

    def read_here(tokens: Tensor) -> Tensor:
        for piece in split_tokens(tokens, READ_AT_ONCE):
            out = model(input_ids=piece, past_key_values=past, use_cache=True, logits_to_keep=1, return_dict=True)
        return out.logits[:, -1]

    return read


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """What tells a tokenizer from others: tokens mean something to the model only by their numbers."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(repr(vocabulary).encode()).hexdigest()[:16]


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


def asks_for_more(model: TraForCausalLM) -> bool:
    """Whether its generation_config.json says more than the loop of this package knows, as penalties."""
    return not model.generation_config.to_diff_dict().keys() <= KNOWN


def _generated_by_transformers(
    model: TraForCausalLM, ids: Tensor, new: int, sampling: Sampling, beams: int, seed: int
) -> list[int]:
    how: dict[str, Any] = {"max_new_tokens": new, "num_beams": beams, "do_sample": sampling.temperature > 0}
    if how["do_sample"]:
        how |= asdict(sampling)
    torch.manual_seed(seed)
    given, checks = ids.to(model.device), LogitsProcessorList([_check_scores])
    with _explained():
        out: Any = model.generate(given, attention_mask=torch.ones_like(given), logits_processor=checks, **how)  # type: ignore[misc]
    return out[0, ids.shape[1] :].tolist()


def _check_scores(ids: Tensor, scores: Tensor) -> Tensor:
    """Raise a RunError for scores among which nothing can be chosen."""
    check_finite(scores, ids.shape[1] + 1)
    return scores
