"""The demo world: a small closed world of facts, lists, code, stories and conversations, written by a seeded Pen."""

from . import chat
from . import plain
from .pen import Pen

# category: (share of the documents, writer)
CATEGORIES = {
    "facts": (14, plain.facts),
    "sums": (9, plain.sums),
    "units": (4, plain.units),
    "series": (8, plain.series),
    "json": (9, plain.json),
    "code": (10, plain.code),
    "logs": (6, plain.logs),
    "story": (10, plain.stories),
    "words": (6, plain.words),
    "chat": (28, chat.chat),
    "tools": (6, chat.tools),
}
NAMES = tuple(CATEGORIES)
CONVERSATIONS = ("chat", "tools")
_RING = [name for name, (share, _) in CATEGORIES.items() for _ in range(share)]


def documents(seed, size):
    """At least `size` characters of documents, as a list of (category, text); equal arguments give equal documents."""
    pen, written, out = Pen(seed), 0, []
    while written < size:
        category = _RING[pen.even(0, len(_RING) - 1)]
        text = CATEGORIES[category][1](pen)
        written += len(text)
        out.append((category, text))
    return out
