"""Text for language modelling: where it comes from, how it becomes tokens, and windows of them as a task."""

from tra.errors import not_installed

try:
    from tra.text.source import Source
    from tra.text.task import Text
    from tra.text.tokenizer import load_tokenizer
    from tra.text.tokens import Tokens, prepare
except ModuleNotFoundError as error:
    raise not_installed(error) from None

__all__ = ["Source", "Text", "Tokens", "load_tokenizer", "prepare"]
