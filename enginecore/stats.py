"""The line of statistics that the core logs every 10 s while there is something to say."""

import logging

from quire.ipc.messages import Beat

log = logging.getLogger("quire.enginecore")

INTERVAL_S = 10.0


class StatsLine:
    def __init__(self, enabled: bool):
        self._enabled = enabled
        self._since: tuple[float, Beat] | None = None
        self._steps = self._rows = self._tokens = 0

    def step(self, num_rows: int, num_tokens: int) -> None:
        self._steps += 1
        self._rows += num_rows
        self._tokens += num_tokens

    def beat(self, beat: Beat, now: float) -> None:
        """`now`: seconds of a monotonic clock."""
        if not self._enabled:
            return
        if self._since is None:
            self._since = (now, beat)
        since, before = self._since
        if now - since < INTERVAL_S:
            return
        if self._steps:
            log.info(self._line(before, beat, now - since))
        self._since = (now, beat)
        self._steps = self._rows = self._tokens = 0

    def _line(self, a: Beat, b: Beat, seconds: float) -> str:
        prompt = b.prompt_tokens - a.prompt_tokens
        hits = (b.cached_tokens - a.cached_tokens) / prompt if prompt else 0.0
        generated = b.generation_tokens - a.generation_tokens
        return (
            f"prompt {prompt / seconds:.1f} tok/s, generation {generated / seconds:.1f} tok/s, "
            f"running {b.num_running}, waiting {b.num_waiting}, KV cache {b.kv_usage:.1%}, prefix hits {hits:.1%}, "
            f"{self._steps / seconds:.1f} steps/s of {self._rows / self._steps:.1f} rows, "
            f"preempted {b.preemptions - a.preemptions}"
        )
