"""Language models of WikiText-103 that are measured in windows longer than those trained on."""

from tra.model import DecoderConfig, sized
from tra.recipes.base import Recipe
from tra.tasks import Evaluation

WINDOWS = (128, 256, 512, 1024, 2048, 4096)


def wikitext103(attention: str = "tra") -> Recipe:
    """The paper's run: medium model, GPT-2's tokenizer. The learning rate and the sliding windows are ours."""
    return Recipe(
        name="wikitext103",
        model=sized("medium", attention=attention),
        task="text",
        task_options={"train": "wikitext-103", "tokenizer": "gpt2"},
        length=128,
        steps=100_000,
        batch=64,
        learning_rate=3e-4,
        log_every=100,
        checkpoint_every=1000,
        evaluations=tuple(Evaluation("test", window, None, stride) for stride in (None, 128) for window in WINDOWS),
    )


def wikitext103_small(attention: str = "tra") -> Recipe:
    """Two cores: a narrower model with a small vocabulary, trained on WikiText-2's articles, measured on part of the
    validation text."""
    return Recipe(
        name="wikitext103-small",
        model=DecoderConfig(vocabulary=4096, layers=4, heads=4, width=256, dropout=0.0, attention=attention),
        task="text",
        task_options={"train": "wikitext-2", "evaluation": "wikitext-103", "tokenizer": "bpe-4096"},
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
