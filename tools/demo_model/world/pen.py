"""Skewed random choices: the one source of randomness of the demo world.

Uniform choices make a language model's best and second-best token nearly equal, so that greedy text hangs on the last
bit of a sum. Every choice here follows Zipf's law instead, and may be *keyed* on something already written: the key
moves the favourite, so that texts differ from each other while each one stays predictable from its own past.
"""

import bisect
import functools
import itertools
import random
import zlib

# Share of choices that ignore the skew, so that the tail of every table is seen and learned.
UNIFORM_SHARE = 0.06


@functools.lru_cache(maxsize=None)
def _cumulative(count, skew):
    """Cumulative Zipf weights 1 / rank**skew of `count` ranks, ending in 1."""
    weights = [1.0 / (rank + 1) ** skew for rank in range(count)]
    total = sum(weights)
    return list(itertools.accumulate(weight / total for weight in weights))


@functools.lru_cache(maxsize=1 << 16)
def _favourite(key, count):
    """Index of the most likely one of `count` items under `key`."""
    return zlib.crc32(key.encode()) % count


class Pen:
    """Draws skewed choices from a seeded generator; equal seeds write equal texts."""

    def __init__(self, seed):
        self._random = random.Random(seed)

    def chance(self, probability):
        """True with the given probability."""
        return self._random.random() < probability

    def index(self, count, key=None, skew=1.3):
        """An index below `count`; index 0, or the key's favourite, is the most likely one."""
        if self._random.random() < UNIFORM_SHARE:
            return self._random.randrange(count)
        rank = min(bisect.bisect(_cumulative(count, skew), self._random.random()), count - 1)
        return rank if key is None else (rank + _favourite(key, count)) % count

    def pick(self, items, key=None, skew=1.3):
        """One of `items` (a sequence), earlier ones more likely, or those behind the key's favourite."""
        return items[self.index(len(items), key, skew)]

    def number(self, low, high, key=None, skew=1.1):
        """An integer in [low, high]; low, or the key's favourite, is the most likely one."""
        return low + self.index(high - low + 1, key, skew)

    def even(self, low, high):
        """An integer in [low, high], all equally likely: only for places that a text starts from."""
        return self._random.randint(low, high)

    def several(self, items, count, key=None, skew=1.3):
        """`count` different items in the order drawn; each draw moves on from the item before it."""
        items = list(items)
        drawn = []
        while len(drawn) < count:
            drawn.append(items.pop(self.index(len(items), key, skew)))
            key = str(drawn[-1])
        return drawn

    def run(self, items, count):
        """`count` neighbours of a ring, from a starting place that may be anywhere."""
        start = self.even(0, len(items) - 1)
        return [items[(start + step) % len(items)] for step in range(count)]
