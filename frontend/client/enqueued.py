"""`LLM.enqueue` and `LLM.wait_for_completion`: requests that begin now and are collected later, over the LLM's LLMEngine."""

import itertools
from collections.abc import Sequence
from typing import Any

from quire.frontend.client.llm_engine import LLMEngine
from quire.frontend.client.outputs import RequestOutput
from quire.frontend.client.prompt import Prompt
from quire.ipc.sampling import SamplingParams


class Enqueued:
    """The requests that were enqueued and not collected yet. For one thread at a time."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._numbers = itertools.count()
        self._waiting: dict[str, RequestOutput | None] = {}  # in the order of their beginning

    def add(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], priority: Sequence[int], loras: Sequence[Any]
    ) -> list[str]:
        """Begin requests; returns their ids. Raises the errors of `LLM.generate`; requests before the faulty one have begun."""
        names = []
        for prompt, each, rank, lora in zip(prompts, params, priority, loras, strict=True):
            name = f"enqueued-{next(self._numbers)}"
            self._engine.add_request(name, prompt, each, lora_request=lora, priority=rank)
            self._waiting[name] = None
            names.append(name)
        return names

    def collect(self) -> list[RequestOutput]:
        """Wait for all of them; returns their outputs in the order of their beginning. Raises the error of a failed one."""
        while any(output is None for output in self._waiting.values()):
            for output in self._engine.step():
                if output.finished and output.request_id in self._waiting:
                    self._waiting[output.request_id] = output
        found = [output for output in self._waiting.values() if output is not None]
        self._waiting.clear()
        return found
