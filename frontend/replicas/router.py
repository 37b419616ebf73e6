"""Router: which of several engines a prompt goes to. It knows where prompts like it were sent before, and how much work it has
given to whom. Pure: no I/O, no clock; called by replicas.py, and by benchmarks/router_sim.py.

`--router cache-aware` weighs, in tokens, the work that waits at an engine and what of the prompt that engine would have to
compute, which counts for more where caches turn over sooner than elsewhere. It looks at the engines that were sent the longest
beginnings of the prompt, and at some random ones, so that a beginning which everybody shares does not make one engine hot.
`least-loaded` looks at the work alone, `round-robin` at nothing.

What is remembered (router_index.py) is a belief: engines evict by themselves, and other frontends send, too. A wrong belief
costs the computing of a prompt, never an answer.
"""

import bisect
import math
import random
from collections.abc import Collection
from typing import Literal, NamedTuple

import numpy as np

from quire.frontend.replicas.router_index import BlockIndex, Places, PrefixHasher

Policy = Literal["cache-aware", "least-loaded", "round-robin"]
POLICIES: tuple[Policy, ...] = ("cache-aware", "least-loaded", "round-robin")
DEFAULT_ROUTER: Policy = POLICIES[0]
MOST_HOLDERS = 8  # that were sent the longest beginnings, and
NUM_OTHERS = 8  # others, which are looked at; all, if there are no more
# A running sequence as work, in prompt tokens: a row that decodes some fifty tokens more costs its engine about so much.
ROW_TOKENS = 64


class Recorded(NamedTuple):
    """What the index was told of a prompt that was sent, for it to be taken back if the engine refuses it."""

    blocks: Places
    num_cached: int  # of these blocks, the first, which the engine had before


class Choice(NamedTuple):
    """Where a prompt was sent: the engine's number, and the tokens that it is believed to compute."""

    engine: int
    num_uncached: int
    recorded: Recorded | None = None


class Router:
    """Numbers of engines are 0 to num_engines - 1; any of them may be chosen until `set_available` says otherwise."""

    def __init__(
        self,
        num_engines: int,
        policy: Policy = "cache-aware",
        *,
        block_size: int = 64,
        max_blocks: int = 1 << 20,
        seed: int | None = None,
    ) -> None:
        """block_size: tokens; the engines'. max_blocks: bound of the index, which forgets the least recently used."""
        self.policy = policy
        self.work = [0] * num_engines  # in tokens: sent and not computed, and rows that run
        self._available = list(range(num_engines))
        self._is_available = [True] * num_engines
        self._filled = [0.0] * num_engines  # tokens that an engine was sent and had to compute: they took the places of others
        self._mean_filled = 0.0
        self._capacities = [math.inf] * num_engines  # tokens
        self._random = random.Random(seed)
        self._last = -1  # of round-robin
        self._hasher = PrefixHasher(block_size)
        self._index = BlockIndex(num_engines, max_blocks) if policy == "cache-aware" else None

    def send(
        self,
        token_ids: np.ndarray,
        *parts: bytes,
        num_rows: int = 1,
        may_hit: bool = True,
        refused: Collection[int] = (),
        only: int | None = None,
    ) -> Choice | None:
        """Choose among the engines that are available and not in `refused`, and take it as sent; None if there is none.

        token_ids: integers [n]. parts: what else is part of the engines' own block hashes: the cache_salt. num_rows: sequences.
        may_hit: False: all is computed, whatever is cached. only: the engine to take, whatever speaks against it, if it may be
        chosen at all.
        """
        usable = [e for e in self._available if e not in refused] if refused else self._available
        if only is not None and only in usable:
            usable = [only]
        if not usable:
            return None
        if self._index is not None:
            choice = self._most_useful(self._index, token_ids, parts, usable, may_hit)
        elif self.policy == "least-loaded":
            choice = Choice(self._least_loaded(usable), len(token_ids))
        else:
            self._last = usable[bisect.bisect_right(usable, self._last) % len(usable)]
            choice = Choice(self._last, len(token_ids))
        self.work[choice.engine] += choice.num_uncached + num_rows * ROW_TOKENS
        return choice

    def _most_useful(
        self, index: BlockIndex, token_ids: np.ndarray, parts: tuple[bytes, ...], usable: list[int], may_hit: bool
    ) -> Choice:
        found = index.look_up(self._hasher.hashes(token_ids, *parts))
        depths = {e: depth for e, depth in zip(*index.depths(found), strict=True) if self._is_available[e]}
        if usable is not self._available:
            depths = {e: depth for e, depth in depths.items() if e in usable}
        holders = sorted(depths, key=depths.__getitem__, reverse=True)[:MOST_HOLDERS]
        if len(usable) > NUM_OTHERS:
            others = [usable[int(self._random.random() * len(usable))] for _ in range(NUM_OTHERS)]
        else:
            others = self._random.sample(usable, len(usable))  # all, for the idle one might be missed; ties are broken anew
        size, num_tokens = self._hasher.block_size if may_hit else 0, len(token_ids)
        engine = min(holders + others, key=lambda e: self._cost(e, num_tokens - size * depths.get(e, 0)))
        depth = depths.get(engine, 0)
        index.add(engine, found, depth)
        num_uncached = num_tokens - size * depth
        self._filled[engine] += num_uncached
        self._mean_filled += num_uncached / len(self._filled)
        return Choice(engine, num_uncached, Recorded(found, depth))

    def _cost(self, engine: int, num_uncached: int) -> float:
        """In tokens to be computed, here and later: what is new to a cache drives out as much that others would have met, so
        it counts twice; up to four times where more is driven out than elsewhere, or all whose prompts begin alike would share
        a few caches."""
        ahead = min(max((self._filled[engine] - self._mean_filled) / self._capacities[engine], 0.0), 1.0)
        return self.work[engine] + num_uncached * 2.0 * (1.0 + ahead)

    def _least_loaded(self, usable: list[int]) -> int:
        least = min(self.work[e] for e in usable)
        return self._random.choice([e for e in usable if self.work[e] == least])

    # ------------------------------------------------------------------------------------------------- what happens
    def refused(self, choice: Choice, num_rows: int) -> None:
        """What was sent was not taken: the engine computes nothing of it, and does not hold its blocks."""
        engine, num_uncached, recorded = choice
        self.computed(engine, num_uncached)
        self.ended(engine, num_rows)
        if self._index is not None and recorded is not None:
            self._index.take_back(engine, *recorded)
            self._filled[engine] -= num_uncached
            self._mean_filled -= num_uncached / len(self._filled)

    def computed(self, engine: int, num_uncached: int) -> None:
        """A prompt's first token has come, or it has ended without one."""
        self.work[engine] -= num_uncached

    def ended(self, engine: int, num_rows: int) -> None:
        """All sequences of what was sent have ended, as far as they count."""
        self.work[engine] -= num_rows * ROW_TOKENS

    def lost(self, engine: int) -> None:
        """All that it was sent has ended, and its cache is gone."""
        self.work[engine] = 0
        mean, before = self._mean_filled, self._filled[engine]
        self._filled[engine] = mean  # its cache has room: nobody's places are taken there
        self._mean_filled += (mean - before) / len(self._filled)
        if self._index is not None:
            self._index.forget(engine)

    def set_available(self, engine: int, is_available: bool) -> None:
        if self._is_available[engine] != is_available:
            self._is_available[engine] = is_available
            self._available = [e for e, available in enumerate(self._is_available) if available]

    def set_capacity(self, engine: int, num_blocks: int) -> None:
        """How many blocks its cache holds. Until it is said, an engine forgets nothing."""
        self._capacities[engine] = max(num_blocks, 1) * self._hasher.block_size
        if self._index is not None:
            self._index.set_capacity(engine, num_blocks)
