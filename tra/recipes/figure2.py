"""The paper's second figure: perplexity of WikiText-103 in windows longer than those trained on."""

from dataclasses import replace

from tra.model import DecoderConfig, sized
from tra.recipes.base import Evaluation, Recipe, TextData

WINDOWS = (128, 256, 512, 1024, 2048, 4096)


def paper() -> dict[str, Recipe]:
    """Medium model, GPT-2's tokenizer. The learning rate and the sliding windows are ours."""
    return {
        "wikitext103": Recipe(
            name="wikitext103",
            model=sized("medium"),
            task="text",
            text=TextData("wikitext-103", tokenizer="gpt2"),
            length=128,
            steps=100_000,
            batch=64,
            learning_rate=3e-4,
            log_every=100,
            checkpoint_every=1000,
            evaluations=tuple(Evaluation("test", window, None, stride) for stride in (None, 128) for window in WINDOWS),
        )
    }


def small() -> dict[str, Recipe]:
    """Two cores: a narrower model with a small vocabulary, trained on WikiText-2's articles, read on part of the
    validation set."""
    return {
        "wikitext103": Recipe(
            name="wikitext103-small",
            model=DecoderConfig(vocabulary=4096, layers=4, heads=4, width=256, dropout=0.0),
            task="text",
            text=TextData("wikitext-2", evaluation="wikitext-103", tokenizer="bpe-4096"),
            length=128,
            steps=1200,
            batch=16,
            learning_rate=3e-3,
            beta2=0.95,
            evaluations=(
                *(Evaluation("valid", window, (1 << 17) // window) for window in WINDOWS),
                *(Evaluation("valid", window, (1 << 17) // window, stride=window // 2) for window in (128, 1024)),
            ),
        )
    }


def smoke() -> dict[str, Recipe]:
    """Seconds, to see that everything works; nothing is learned."""
    return {
        name: replace(
            recipe,
            model=DecoderConfig(vocabulary=300, layers=2, heads=2, width=16),
            text=TextData("wikitext-2", evaluation="wikitext-103", tokenizer="bpe-300"),
            length=16,
            steps=4,
            batch=4,
            checkpoint_every=2,
            log_every=1,
            evaluations=(
                Evaluation("valid", 16, 8),
                Evaluation("valid", 32, 4),
                Evaluation("valid", 32, 4, stride=8),
            ),
        )
        for name, recipe in small().items()
    }
