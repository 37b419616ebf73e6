"""Texts that are longer than the context: their vectors are means of their parts' (vLLM's chunked processing).

--pooler-config's enable_chunked_processing allows it, up to max_embed_len tokens. A text is cut into parts as long as the
context and a shorter last one; each part counts by its tokens, and the mean is normalized if the parts are.
"""

from collections.abc import Sequence

import numpy as np

from quire.frontend.client.stream import TooLong
from quire.ipc.messages.frontend import EngineLimits
from quire.ipc.pooling import PoolingParams

Ids = Sequence[int] | np.ndarray


def longest_text(limits: EngineLimits, params: PoolingParams | None = None) -> int:
    """Most tokens of a text. params: of the request; None: for a vector."""
    info = limits.pooling
    if info is None or (params is not None and (params.tasks or (params.task or info.tasks[0]) != "embed")):
        return limits.max_model_len
    return max(info.max_embed_len, limits.max_model_len)


class Parts:
    """Prompts with the long ones cut into parts, which fit the context."""

    def __init__(self, prompts: Sequence[Ids], limits: EngineLimits, params: PoolingParams) -> None:
        """Raises TooLong."""
        most, self._limits, self._params = limits.max_model_len, limits, params
        longest, length = longest_text(limits, params), max(map(len, prompts), default=0)
        self.are_whole = longest == most or length <= most
        self.prompts: Sequence[Ids] = prompts
        if self.are_whole:
            return
        if length > longest:
            raise TooLong(f"the prompt has {length} tokens; at most {longest} are taken, in parts (max_embed_len)")
        starts = [range(0, len(prompt), most) if len(prompt) > most else range(1) for prompt in prompts]
        self.prompts = [
            prompt[start : start + most] if len(own) > 1 else prompt
            for prompt, own in zip(prompts, starts, strict=True)
            for start in own
        ]
        self._counts = [len(own) for own in starts]

    def vectors(self, results: list[np.ndarray]) -> list[np.ndarray]:
        """A vector of each prompt, of those of all parts."""
        if self.are_whole:
            return results
        found, at = [], 0
        for count in self._counts:
            own, lengths = results[at : at + count], [len(part) for part in self.prompts[at : at + count]]
            found.append(own[0] if count == 1 else self._mean(np.stack(own), np.array(lengths, np.float32)))
            at += count
        return found

    def sums(self, numbers: list[int]) -> list[int]:
        """A number of each prompt, of those of all parts."""
        if self.are_whole:
            return numbers
        starts = np.cumsum([0, *self._counts[:-1]])
        return [int(n) for n in np.add.reduceat(numbers, starts)]

    def _mean(self, vectors: np.ndarray, weights: np.ndarray) -> np.ndarray:
        mean = (weights[:, None] * vectors).sum(0) / weights.sum()
        use = self._params.use_activation
        if use is None:
            use = self._limits.pooling is not None and self._limits.pooling.use_activation
        return mean / max(float(np.linalg.norm(mean)), 1e-12) if use else mean
