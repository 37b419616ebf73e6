"""Router: chooses one of several engines for a prompt. It knows where similar prompts were sent before, and how much work each
engine has. No I/O and no clock; called by replicas.py, and by benchmarks/router_sim.py.

`--router cache-aware` adds up, in tokens, the work that waits at an engine and the part of the prompt that it would have to
compute, which weighs more where the cache turns over faster than elsewhere. It compares the engines that were sent the longest
prefixes of the prompt, and some random ones, so that a prefix which all prompts share does not overload one engine.
`least-loaded` compares only the work, `round-robin` nothing.

The index of sent prompts (router_index.py) is an estimate: engines evict by themselves, and other frontends send to them, too.
A wrong estimate costs the computation of a prompt, but never makes an answer wrong.
"""

import bisect
import math
import random
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

import numpy as np

from quire.frontend.replicas.router_index import BlockIndex, Places, PrefixHasher

Policy = Literal["cache-aware", "least-loaded", "round-robin"]
POLICIES: tuple[Policy, ...] = ("cache-aware", "least-loaded", "round-robin")
DEFAULT_ROUTER: Policy = POLICIES[0]
MOST_HOLDERS = 8  # engines compared that were sent the longest prefixes, and
NUM_OTHERS = 8  # random ones; all engines, if there are no more than these
# Work of a running sequence, in prompt tokens: about what it costs the engine to decode some fifty tokens more.
ROW_TOKENS = 64


class Recorded(NamedTuple):
    """The index entries of a sent prompt, to undo them if the engine refuses it."""

    blocks: Places
    num_cached: int  # how many of the first blocks the engine had before


class Choice(NamedTuple):
    """Where a prompt was sent: the engine's number, and the tokens that it probably has to compute."""

    engine: int
    num_uncached: int
    recorded: Recorded | None = None


class Router:
    """Engines are numbered 0 to num_engines - 1; all are available until `set_available` says otherwise."""

    def __init__(
        self,
        num_engines: int,
        policy: Policy = "cache-aware",
        *,
        block_size: int = 64,
        max_blocks: int = 1 << 20,
        seed: int | None = None,
    ) -> None:
        """block_size: tokens per KV block of the engines. max_blocks: limit of the index, beyond which it evicts old ones."""
        self.policy = policy
        self.work = [0] * num_engines  # tokens: prompt tokens not computed yet, and ROW_TOKENS per running sequence
        self._available = list(range(num_engines))
        self._is_available = [True] * num_engines
        self._filled = [0.0] * num_engines  # tokens that an engine had to compute: they evicted as many from its cache
        self._mean_filled = 0.0
        self._capacities = [math.inf] * num_engines  # tokens
        self._random = random.Random(seed)
        self._last = -1  # the last engine of round-robin
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
        more: Sequence[int] = (),
    ) -> Choice | None:
        """Choose among the available engines that are not in `refused`, and count the prompt as sent; None if there is none.

        token_ids: integers [n]. parts: other inputs of the engines' block hashes: cache_salt, adapter. num_rows: sequences.
        may_hit: False if the whole prompt is computed even if it is cached. only: the engine to choose, if it is usable. more:
        by engine, tokens of other work that the request would cause there; empty: none.
        """
        usable = [e for e in self._available if e not in refused] if refused else self._available
        if only is not None and only in usable:
            usable = [only]
        if not usable:
            return None
        if self._index is not None:
            choice = self._most_useful(self._index, token_ids, parts, usable, may_hit, more)
        elif self.policy == "least-loaded":
            choice = Choice(self._least_loaded(usable, more), len(token_ids))
        else:
            self._last = usable[bisect.bisect_right(usable, self._last) % len(usable)]
            choice = Choice(self._last, len(token_ids))
        self.work[choice.engine] += choice.num_uncached + num_rows * ROW_TOKENS
        return choice

    def _most_useful(
        self,
        index: BlockIndex,
        token_ids: np.ndarray,
        parts: tuple[bytes, ...],
        usable: list[int],
        may_hit: bool,
        more: Sequence[int],
    ) -> Choice:
        found = index.look_up(self._hasher.hashes(token_ids, *parts))
        depths = {e: depth for e, depth in zip(*index.depths(found), strict=True) if self._is_available[e]}
        if usable is not self._available:
            depths = {e: depth for e, depth in depths.items() if e in usable}
        holders = sorted(depths, key=depths.__getitem__, reverse=True)[:MOST_HOLDERS]
        if len(usable) > NUM_OTHERS:
            others = [usable[int(self._random.random() * len(usable))] for _ in range(NUM_OTHERS)]
        else:
            others = self._random.sample(usable, len(usable))  # all, to include the idle one; random order for ties
        size, num_tokens = self._hasher.block_size if may_hit else 0, len(token_ids)
        costs = {e: self._cost(e, num_tokens - size * depths.get(e, 0)) for e in (*holders, *others)}
        engine = min(costs, key=lambda e: costs[e] + (more[e] if more else 0))
        depth = depths.get(engine, 0)
        index.add(engine, found, depth)
        num_uncached = num_tokens - size * depth
        self._filled[engine] += num_uncached
        self._mean_filled += num_uncached / len(self._filled)
        return Choice(engine, num_uncached, Recorded(found, depth))

    def _cost(self, engine: int, num_uncached: int) -> float:
        """Tokens to compute, now and later: new tokens evict as many that other prompts would have found, so they count twice;
        up to four times where more is evicted than elsewhere, or all prompts with a common prefix would share a few caches."""
        ahead = min(max((self._filled[engine] - self._mean_filled) / self._capacities[engine], 0.0), 1.0)
        return self.work[engine] + num_uncached * 2.0 * (1.0 + ahead)

    def _least_loaded(self, usable: list[int], more: Sequence[int]) -> int:
        work = {e: self.work[e] + (more[e] if more else 0) for e in usable}
        least = min(work.values())
        return self._random.choice([e for e in usable if work[e] == least])

    # ------------------------------------------------------------------------------------------------- what happens
    def refused(self, choice: Choice, num_rows: int) -> None:
        """The engine has refused the prompt: it computes nothing of it, and does not hold its blocks."""
        engine, num_uncached, recorded = choice
        self.computed(engine, num_uncached)
        self.ended(engine, num_rows)
        if self._index is not None and recorded is not None:
            self._index.take_back(engine, *recorded)
            self._filled[engine] -= num_uncached
            self._mean_filled -= num_uncached / len(self._filled)

    def computed(self, engine: int, num_uncached: int) -> None:
        """The prompt's first output token has arrived, or the request has ended without one."""
        self.work[engine] -= num_uncached

    def ended(self, engine: int, num_rows: int) -> None:
        """All sequences of a request have ended."""
        self.work[engine] -= num_rows * ROW_TOKENS

    def lost(self, engine: int) -> None:
        """All of the engine's requests have ended, and its cache is empty."""
        self.work[engine] = 0
        mean, before = self._mean_filled, self._filled[engine]
        self._filled[engine] = mean  # its cache has room, so new tokens evict nothing
        self._mean_filled += (mean - before) / len(self._filled)
        if self._index is not None:
            self._index.forget(engine)

    def set_available(self, engine: int, is_available: bool) -> None:
        if self._is_available[engine] != is_available:
            self._is_available[engine] = is_available
            self._available = [e for e, available in enumerate(self._is_available) if available]

    def set_capacity(self, engine: int, num_blocks: int) -> None:
        """Set how many KV blocks an engine's cache holds; until then its capacity counts as infinite."""
        self._capacities[engine] = max(num_blocks, 1) * self._hasher.block_size
        if self._index is not None:
            self._index.set_capacity(engine, num_blocks)
