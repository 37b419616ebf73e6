"""The interface of custom logits processors: vLLM's V1 class, its batch updates, and the engine's settings that classes get.

Names and meanings are vLLM's (vllm.v1.sample.logits_processor), so that a class written for vLLM runs here unchanged; load.py
lets it import them under vLLM's module names if vLLM is not installed. The implementation is our own.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import torch

from quire.ipc.sampling import SamplingParams

S = TypeVar("S")


class MoveDirectionality(Enum):
    UNIDIRECTIONAL = auto()  # the request at the first index is now at the second
    SWAP = auto()  # the two have changed places


# (index, params, prompt ids, output ids): the last list grows as tokens are sampled
AddedRequest = tuple[int, SamplingParams, list[int] | None, list[int]]
MovedRequest = tuple[int, int, MoveDirectionality]


@dataclass(frozen=True)
class BatchUpdate:
    """How the batch has changed since the last step; indices are rows of the logits that `apply` gets.

    An added or moved request may take the index of one that has left, which then is not in `removed`.
    """

    batch_size: int
    removed: Sequence[int]
    added: Sequence[AddedRequest]
    moved: Sequence[MovedRequest]


class VllmConfig:
    """The engine's settings for processors, under vLLM's names: model_config, scheduler_config, cache_config, device_config,
    parallel_config, additional_config. Raises AttributeError, with a text that lists these, for any other name."""

    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"vllm_config has no {name} in this engine; it has {', '.join(self.__dict__)}")


class ModelConfig(SimpleNamespace):
    """model, max_model_len, dtype, vocab_size, hf_config (config.json's fields)."""

    def get_vocab_size(self) -> int:
        size: int = self.vocab_size
        return size


class LogitsProcessor:
    """Changes the logits of the requests in a batch.

    Here a batch contains the requests with SamplingParams.extra_args. If this or another class has the attribute `all_requests
    = True`, it contains every request.
    """

    all_requests = False

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError for a request that cannot be run: the request gets a 400 with its text."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        raise NotImplementedError

    def is_argmax_invariant(self) -> bool:
        """Whether the most likely token always stays the same; such a processor sees logits divided by the temperature."""
        raise NotImplementedError

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called before each `apply`; None if the same requests are in the batch, at the same indices."""
        raise NotImplementedError

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """logits: float32 [batch, vocabulary], which may be changed in place; returns the logits to continue with."""
        raise NotImplementedError


def process_dict_updates(
    entries: dict[int, S],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], S | None],
) -> bool:
    """Update `entries`, the state of requests by index, to the batch; returns whether it changed.

    new_state: makes the state of an added request, or None if the processor does not act on it.
    """
    if batch_update is None:
        return False
    changed = False
    for index in batch_update.removed:
        changed |= entries.pop(index, None) is not None
    for index, params, prompt, output in batch_update.added:
        changed |= entries.pop(index, None) is not None
        if (state := new_state(params, prompt, output)) is not None:
            entries[index], changed = state, True
    for source, target, direction in batch_update.moved:
        moved, displaced = entries.pop(source, None), entries.pop(target, None)
        changed |= moved is not None or displaced is not None
        if moved is not None:
            entries[target] = moved
        if displaced is not None and direction is MoveDirectionality.SWAP:
            entries[source] = displaced
    return changed


RequestLogitsProcessor = Callable[..., torch.Tensor]  # takes (output ids, logits) or (prompt ids, output ids, logits)


class AdapterLogitsProcessor(LogitsProcessor):
    """For processors of one request at a time: a subclass returns one, or None, for each request's params."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.req_info: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {}

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        raise NotImplementedError

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.req_info, batch_update, self._new_state)

    def _new_state(
        self, params: SamplingParams, prompt: list[int] | None, output: list[int]
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        processor = self.new_req_logits_processor(params)
        if processor is None:
            return None
        takes_prompt = len(inspect.signature(processor).parameters) == 3
        return partial(processor, prompt, output) if takes_prompt else partial(processor, output)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for index, processor in self.req_info.items():
            logits[index] = processor(logits[index])
        return logits
