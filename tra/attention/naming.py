"""How a config names the mechanisms of its layers: ``"tra"``, or ``"rope+tra"`` for layers that take turns."""

from tra import plugins
from tra.attention import MECHANISMS, Attention

JOINED_BY = "+"


def mechanism_names(attention: str) -> list[str]:
    """The names in turn: layer i has the one at i modulo their number.

    Example:
        >>> mechanism_names("rope+rope+tra")
        ['rope', 'rope', 'tra']
    """
    return attention.split(JOINED_BY)


def find_mechanisms(attention: str) -> list[type[Attention]]:
    """The mechanisms in turn, or a ValueError that names the one that does not exist."""
    if not isinstance(attention, str):
        raise ValueError(f"attention must be a name, or several joined by {JOINED_BY!r}, got {attention!r}")
    return [plugins.find("MECHANISMS", MECHANISMS, name, "attention") for name in mechanism_names(attention)]


def plugins_of(attention: str) -> list[str]:
    """The plug-ins that the mechanisms come from, none for built-in ones."""
    sources = (plugins.source("MECHANISMS", name) for name in mechanism_names(attention))
    return sorted({source for source in sources if source is not None})
