"""Expected: how long steps take, so that the core knows when the next result is due and how long it may sleep. No clock.

The core's loop (core.py) tells it what each step took. It keeps running means, and knows nothing of rows or sequences.
"""

from quire.enginecore.scheduling.step import ScheduledStep


class Expected:
    """How long steps take, by running means: of a step of decode rows, and of a token of steps with prompts."""

    def __init__(self) -> None:
        self._decode_s = self._token_s = 0.0

    def learn(self, step: ScheduledStep, seconds: float) -> None:
        if step.prefills:
            self._token_s += 0.2 * (seconds / step.num_tokens - self._token_s)
        else:
            self._decode_s += 0.2 * (seconds - self._decode_s)

    def seconds(self, step: ScheduledStep) -> float:
        return self._token_s * step.num_tokens if step.prefills else self._decode_s
