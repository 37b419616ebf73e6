"""ReasoningCount: how many of a response's output tokens were reasoning, for its usage.

A plan of the output (output_plan.py, harmony_plan.py) makes one for each request, and the routes' answers feed it.
"""

from quire.frontend.client.outputs import Delta
from quire.frontend.http.api.prompt_run import PromptRun


class ReasoningCount:
    """Counts how many of a response's tokens were reasoning, as `num_reasoning_tokens` of its runs."""

    __slots__ = ("_end", "_over")

    def __init__(self, end_token_id: int | None) -> None:
        """end_token_id: the token that ends reasoning; None if there is nothing to count."""
        self._end = end_token_id
        self._over: set[int] = set()  # choices in which that token has ended the reasoning

    def add(self, run: PromptRun, delta: Delta, never_reasoned: bool) -> None:
        """Count a delta's tokens of reasoning, including the one that ends it. never_reasoned: the output began without any."""
        end, i, ids = self._end, delta.index, delta.token_ids
        if end is None:
            return
        if run.num_reasoning_tokens is None:
            run.num_reasoning_tokens = [0] * len(run.num_tokens)
        if never_reasoned:
            run.num_reasoning_tokens[i] = 0
        elif i not in self._over:
            run.num_reasoning_tokens[i] += ids.index(end) + 1 if end in ids else len(ids)
            self._over |= {i} if end in ids else set()
