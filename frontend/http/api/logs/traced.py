"""What a traced request has generated: how generate.py tells tracing.py, which it does not know.

A context variable that is set only where requests are traced, so a request that is not pays for one look at it, at its end.
"""

from collections.abc import Callable
from contextvars import ContextVar

from quire.frontend.http.api.prompt_run import PromptRun


class Generated:
    """What a request has generated: its name and its prompts' runs, noted when they are over. late: called with this when that
    is after the answer, as in the background."""

    __slots__ = ("late", "name", "runs")

    def __init__(self) -> None:
        self.name = ""
        self.runs: list[PromptRun] = []
        self.late: Callable[[Generated], None] | None = None


generated_by: ContextVar[Generated | None] = ContextVar("generated", default=None)


def note_runs(name: str, runs: list[PromptRun]) -> None:
    """The request that this task answers has generated; nothing happens if it is not traced."""
    generated = generated_by.get()
    if generated is not None:
        generated.name = name
        generated.runs += runs
        if generated.late is not None and runs:
            generated.late(generated)
