"""The progress bar of a batch (`LLM.generate`): prompts done, and input and output tokens per second."""

import asyncio
from typing import Any, Self

from quire.frontend.client.stream import Stream

_BAR_DELAY_S = 1.0  # a shorter batch shows no bar
_BAR_REFRESH_S = 0.5


class ProgressBar:
    """A progress bar over prompts, with token rates; it appears for batches that take a while. Used on the event loop.

    It is drawn by a timer and reads the running streams only then, so tokens cost nothing.
    """

    def __init__(self, total: int, enabled: bool) -> None:
        self.running: set[Stream] = set()
        self._bar: Any = None
        self._drawing: asyncio.Task[None] | None = None
        self._done = self._tokens_in = self._tokens_out = 0  # of prompts that have ended
        if enabled and total > 1:
            from tqdm import tqdm

            # miniters=0: redraw also if only the rates have changed
            self._bar = tqdm(total=total, desc="Processed prompts", delay=_BAR_DELAY_S, miniters=0, dynamic_ncols=True)

    def add(self, tokens_in: int, tokens_out: int) -> None:
        """Count a prompt that has ended."""
        self._done += 1
        self._tokens_in += tokens_in
        self._tokens_out += tokens_out

    async def _draw_forever(self) -> None:
        while True:
            await asyncio.sleep(_BAR_REFRESH_S)
            self._draw()

    def _draw(self) -> None:
        """Update the bar; within the delay, tqdm shows nothing."""
        tokens_in = self._tokens_in + sum(s.num_prompt_tokens for s in self.running if s.num_cached_tokens is not None)
        tokens_out = self._tokens_out + sum(s.num_output_tokens for s in self.running)
        elapsed = self._bar.format_dict["elapsed"] or 1e-9
        rates = f"input: {tokens_in / elapsed:.0f} tok/s, output: {tokens_out / elapsed:.0f} tok/s"
        self._bar.set_postfix_str(rates, refresh=False)
        self._bar.update(self._done - self._bar.n)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._drawing = asyncio.get_running_loop().create_task(self._draw_forever())
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawing is not None:
            self._drawing.cancel()
            self._draw()
            self._bar.close()
