"""ThoughtCount: how many of an answer's tokens were thoughts, for its usage. Fed by whoever parses the answer's deltas."""

from quire.frontend.client.outputs import Delta
from quire.frontend.http.api.output_plan import OutputPlan
from quire.frontend.http.api.prompt_run import PromptRun


class ThoughtCount:
    """Of one response. It writes `num_reasoning_tokens` of the runs."""

    def __init__(self, plan: OutputPlan) -> None:
        self._plan = plan
        self._over: set[int] = set()  # choices whose thought a token has ended

    def add(self, run: PromptRun, delta: Delta, never_thought: bool) -> None:
        """Count the tokens of thoughts, with the one that ends them. never_thought: the output has begun without one."""
        end, i, ids = self._plan.end_token_id, delta.index, delta.token_ids
        if end is None or not self._plan.may_think:
            return
        if run.num_reasoning_tokens is None:
            run.num_reasoning_tokens = [0] * len(run.num_tokens)
        if never_thought:
            run.num_reasoning_tokens[i] = 0
        elif i not in self._over:
            run.num_reasoning_tokens[i] += ids.index(end) + 1 if end in ids else len(ids)
            self._over |= {i} if end in ids else set()
