"""Text given on the command line."""

from pathlib import Path


def or_file(text: str, argument: str) -> str:
    """A text, or with @ before it the file that holds it; @@ stands for an @ that is text."""
    if not text.startswith("@") or text.startswith("@@"):
        return text.removeprefix("@")
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{argument} must be text, @@ before what begins with @, or @ and a file: {error}") from error
