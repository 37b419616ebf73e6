"""AdapterPlaces: which adapters the engines' slots are busy with, as far as this frontend can know. No I/O.

An engine where all adapter slots are busy with others takes a request only after one of them has drained and the request's own
adapter was loaded. The router counts that as tokens, so that requests for one adapter go where it runs, unless much more work
waits there. Heartbeats tell what runs, and what this frontend has sent since is counted here. Owned by Replicas.
"""

from collections import Counter
from collections.abc import Sequence

from quire.ipc.messages.stats import AdapterStats

# Work of a swap, in prompt tokens: an adapter of an 8B takes 25 ms from the page cache, in which an H200 computes some 1,250
# tokens, and the wait for a slot takes longer than that.
SWAP_TOKENS = 4096


class AdapterPlaces:
    def __init__(self, num_engines: int) -> None:
        self._sent: list[Counter[str]] = [Counter() for _ in range(num_engines)]  # requests of this frontend, by adapter
        self._told: list[AdapterStats | None] = [None] * num_engines

    def told(self, engine: int, stats: AdapterStats | None) -> None:
        self._told[engine] = stats

    def sent(self, engine: int, adapter: str) -> None:
        """adapter: empty for the model itself."""
        if adapter:
            self._sent[engine][adapter] += 1

    def ended(self, engine: int, adapter: str) -> None:
        if adapter:
            self._sent[engine][adapter] -= 1
            if not self._sent[engine][adapter]:
                del self._sent[engine][adapter]

    def lost(self, engine: int) -> None:
        self._sent[engine].clear()
        self._told[engine] = None

    def swaps(self, adapter: str) -> Sequence[int]:
        """By engine: tokens that a swap for this adapter counts as. Empty if there is none anywhere."""
        return [self._swap(engine, adapter) for engine in range(len(self._sent))] if adapter else ()

    def _swap(self, engine: int, adapter: str) -> int:
        stats = self._told[engine]
        if stats is None:
            return 0
        busy = {*stats.running, *stats.waiting, *self._sent[engine]}
        return SWAP_TOKENS if adapter not in busy and len(busy) >= stats.max_loras else 0

    def check(self) -> None:
        """Assert that no request is counted; called when none runs."""
        assert not any(self._sent), self._sent
