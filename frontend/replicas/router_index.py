"""The router's index of prompts: hashes of their blocks (PrefixHasher), and the engines that were sent them (BlockIndex).

Both process a whole prompt at once, in numpy, since the event loop waits for each decision. Used by router.py.
"""

import hashlib
import secrets
from typing import NamedTuple

import numpy as np

MAX_TOKENS = 1 << 18  # hashed of a prompt; beyond them a longer common prefix makes no difference
_MIX = np.uint64(0x9E3779B97F4A7C15)
_HALF, _THIRD = np.uint64(32), np.uint64(29)
NUM_WAYS = 8
NUM_HOLDERS = 8  # engines stored per block, those that were sent it last
_FOREVER = 1 << 31  # blocks
_MARGIN = 1 << 28  # blocks that stamps are reduced by: no stamp exceeds its clock, even after the clock was turned back


class PrefixHasher:
    """Hashes of all prefixes of a prompt that end with a full block; each covers all tokens of the prefix, and the salt.

    h(i) = mix(root(salt) + sum over the tokens t before the block's end of (id(t) + 1) * key(t)), modulo 2^64, with a random
    key for each position (multilinear hashing; Carter and Wegman). Different prompts collide with probability 2^-46 at worst,
    even if somebody chose them without knowing the keys. A chain of cryptographic hashes would take longer and is not needed:
    after a collision an engine computes a prompt, but no request reads another's KV blocks.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._secret = secrets.token_bytes(32)
        self._keys = np.random.default_rng().integers(0, 1 << 64, MAX_TOKENS, np.uint64)

    def hashes(self, token_ids: np.ndarray, *parts: bytes) -> np.ndarray:
        """uint64 [full blocks] of token_ids (integers [n]); parts: other data that must be equal."""
        size = self.block_size
        end = min(len(token_ids), MAX_TOKENS) // size * size
        products = (token_ids[:end].astype(np.uint64) + np.uint64(1)) * self._keys[:end]
        sums = np.cumsum(products.reshape(-1, size).sum(axis=1, dtype=np.uint64), dtype=np.uint64)
        sums += self._root(parts)
        sums ^= sums >> _HALF
        sums *= _MIX
        sums ^= sums >> _THIRD
        return sums

    def _root(self, parts: tuple[bytes, ...]) -> np.uint64:
        h = hashlib.blake2b(key=self._secret, digest_size=8)
        for part in parts:
            h.update(len(part).to_bytes(8, "little") + part)
        return np.uint64(int.from_bytes(h.digest(), "little"))


class Places(NamedTuple):
    """The bucket and place of each of a prompt's hashes in the index, and whether it is there."""

    hashes: np.ndarray  # uint64 [n]
    buckets: np.ndarray  # int64 [n]
    places: np.ndarray  # int64 [n], meaningful where is_known
    is_known: np.ndarray  # bool [n]


class BlockIndex:
    """A bounded table of block hashes and of the engines that were sent them.

    It is built like a set-associative CPU cache: a hash has NUM_WAYS possible places, and a new one replaces the least recently
    used of them. The table never grows or moves, so no decision waits for that. Each of max_blocks takes 60 bytes.

    An engine's clock counts the blocks that it had to compute. Each of them evicts another once the cache is full, so a block
    counts as evicted when the clock has advanced by the cache's capacity since the engine was sent it. `take_back` turns the
    clock back by the blocks of a refused prompt.
    """

    def __init__(self, num_engines: int, max_blocks: int) -> None:
        """num_engines: at most 65535."""
        num_buckets = max(1, -(-max_blocks // NUM_WAYS))
        num_places = num_buckets * NUM_WAYS
        self._num_buckets = np.uint64(num_buckets)
        self._no_engine = num_engines
        self._hashes = np.zeros(num_places, np.uint64)
        self._by_bucket = self._hashes.reshape(num_buckets, NUM_WAYS)
        self._used = np.zeros(num_places, np.uint32)  # value of _now at the last `add`
        self._used_by_bucket = self._used.reshape(num_buckets, NUM_WAYS)
        self._holders = np.full((num_places, NUM_HOLDERS), self._no_engine, np.uint16)
        self._stamps = np.zeros((num_places, NUM_HOLDERS), np.uint32)  # value of the holder's clock, less _MARGIN
        self._clocks = np.zeros(num_engines + 1, np.uint32)  # modulo 2^32, as are their differences
        self._capacities = np.full(num_engines + 1, _FOREVER + _MARGIN, np.uint32)
        self._capacities[self._no_engine] = 0
        self._depths = np.zeros(num_engines + 1, np.int32)  # all 0 between two calls
        self._now = 0

    def set_capacity(self, engine: int, num_blocks: int) -> None:
        """Set how many KV blocks an engine's cache holds."""
        self._capacities[engine] = num_blocks + _MARGIN

    def forget(self, engine: int) -> None:
        """Drop the engine's blocks: it was restarted with an empty cache."""
        self._turn(engine, int(self._capacities[engine]))

    def look_up(self, hashes: np.ndarray) -> Places:
        buckets = ((hashes >> _HALF) * self._num_buckets >> _HALF).astype(np.int64)
        ways = (self._by_bucket[buckets] == hashes[:, None]).argmax(axis=1)
        places = buckets * NUM_WAYS + ways
        return Places(hashes, buckets, places, self._hashes[places] == hashes)

    def depths(self, found: Places) -> tuple[list[int], list[int]]:
        """(engines, how many of the prompt's first blocks each was sent); engines with none are left out.

        Only its last known block counts: it was sent all before that, too, even if those list other engines (NUM_HOLDERS each).
        """
        which = np.flatnonzero(found.is_known)
        places = found.places[which]
        holders = self._holders[places]
        ages = self._clocks[holders] - self._stamps[places]
        holders[ages >= self._capacities[holders]] = self._no_engine
        depths = self._depths
        depths[holders] = which[:, None] + 1  # in order: an engine's last block overwrites its earlier ones
        depths[self._no_engine] = 0
        engines = np.flatnonzero(depths)
        of_engines = depths[engines]
        depths[engines] = 0
        return engines.tolist(), of_engines.tolist()

    def add(self, engine: int, found: Places, num_cached: int) -> None:
        """The engine was sent this prompt, and probably had its first num_cached blocks."""
        places = found.places
        if not len(places):
            return
        self._now = self._now + 1 & 0xFFFFFFFF
        self._turn(engine, len(places) - num_cached)
        stamp = int(self._clocks[engine]) - _MARGIN & 0xFFFFFFFF
        new = np.flatnonzero(~found.is_known)
        old = places[found.is_known]
        self._used[old] = self._now  # before _places_for, which must not choose these
        if len(new):
            places[new] = added = self._places_for(found.buckets[new])
            self._hashes[added] = found.hashes[new]
            self._holders[added] = self._no_engine
            self._holders[added, 0] = engine
            self._stamps[added, 0] = stamp
        if len(old):
            slots = self._slots(engine, old)
            self._holders[old, slots] = engine
            self._stamps[old, slots] = stamp
        self._used[places] = self._now

    def take_back(self, engine: int, found: Places, num_cached: int) -> None:
        """Undo `add` after the engine refused the prompt; the entry it evicted is not restored."""
        places = found.places[num_cached:]
        if not len(places):
            return
        places = places[self._hashes[places] == found.hashes[num_cached:]]  # other hashes may have replaced them
        holders = self._holders[places]
        holders[holders == engine] = self._no_engine
        self._holders[places] = holders
        self._turn(engine, num_cached - len(found.places))

    def _places_for(self, buckets: np.ndarray) -> np.ndarray:
        """The least recently used place in each of these buckets, and the next ones for more hashes in the same bucket."""
        ways = self._used_by_bucket[buckets].argmin(axis=1)
        order = buckets.argsort(kind="stable")
        in_order = buckets[order]
        rank = np.arange(len(order)) - in_order.searchsorted(in_order)  # of each hash among those of the same bucket
        again = rank.nonzero()[0]  # hashes that share a bucket: few or none
        by_use = self._used_by_bucket[in_order[again]].argsort(axis=1, kind="stable")
        ways[order[again]] = by_use[np.arange(len(again)), rank[again] % NUM_WAYS]
        return buckets * NUM_WAYS + ways

    def _turn(self, engine: int, num_blocks: int) -> None:
        self._clocks[engine] = int(self._clocks[engine]) + num_blocks & 0xFFFFFFFF

    def _slots(self, engine: int, places: np.ndarray) -> np.ndarray:
        """A slot for the engine in each place: its own if it has one, else a free one, else the slot of the holder that has
        computed most since then."""
        holders = self._holders[places]
        ages = (self._clocks[holders] - self._stamps[places]).astype(np.int64)
        ages[holders == self._no_engine] = 1 << 32
        ages[holders == engine] = 1 << 33
        return ages.argmax(axis=1)
