"""Text for language modelling: where it comes from, how it becomes tokens, and windows of them as a task."""

from tra.text.source import Source
from tra.text.task import Text
from tra.text.tokenizer import load_tokenizer
from tra.text.tokens import Tokens, prepare

__all__ = ["Source", "Text", "Tokens", "load_tokenizer", "prepare"]
