"""GenerateTask: a request's children sample tokens behind their prompt, until a stop id or their length ends them.

A chunk of the prompt may yield the log-probabilities of its tokens, and the last one those of the likeliest next tokens, for a
beam search. `asked` finds what such a request is refused for.
"""

import numpy as np

from quire.enginecore.refusal import Refused
from quire.enginecore.resumed import outputs_so_far
from quire.enginecore.tasks.task import Asked, Chunk, Prompted, SideTarget
from quire.ipc.limits import longest_prompt, output_limit, output_room
from quire.ipc.messages.frontend import Candidates, EngineLimits, Generate
from quire.ipc.messages.workers import ProcessorsInfo
from quire.ipc.sampling import RequestOutputKind, SamplingParams, check_against
from quire.ipc.step.sections import (
    MAX_CANDIDATES,
    PREFILL_CANDIDATES,
    PREFILL_PROMPT_LOGPROBS,
    PREFILL_SAMPLE,
    SAMPLING_CUSTOM,
    SAMPLING_FILTER,
    SAMPLING_LOGPROBS,
    SAMPLING_PROCESSORS,
    SAMPLING_RANDOM,
)


class GenerateTask:
    """min_tokens_stop_ids: all ids that min_tokens masks. num_candidates: for the token after the prompt; 0: none."""

    ends_with_prompt = False

    def __init__(
        self,
        sampling: SamplingParams,
        stop_ids: frozenset[int] = frozenset(),
        min_tokens_stop_ids: list[int] | None = None,
        is_processed: bool = False,
        num_candidates: int = 0,
    ) -> None:
        self.sampling, self.stop_ids, self.is_processed = sampling, stop_ids, is_processed
        self.min_tokens_stop_ids = min_tokens_stop_ids or []
        self.num_candidates = num_candidates
        self.ends_by_length = sampling.ignore_eos and not stop_ids and not sampling.stop
        self.is_stream = sampling.output_kind is not RequestOutputKind.FINAL_ONLY
        self.runs_again = not num_candidates
        self.sampling_kind = (
            (0 if sampling.is_greedy else SAMPLING_RANDOM)
            | (SAMPLING_FILTER if sampling.needs_filter else 0)
            | (SAMPLING_PROCESSORS if sampling.needs_logits_processors else 0)
            | (SAMPLING_LOGPROBS if sampling.logprobs is not None else 0)
            | (SAMPLING_CUSTOM if is_processed else 0)
        )

    def chunk(self, seq: Prompted, start: int, end: int, known: int) -> Chunk:
        flags = PREFILL_SAMPLE if end == known else 0
        num_top = self.sampling.prompt_logprobs
        if num_top is not None and seq.child == 0 and seq.num_scored <= start < len(seq.prompt):
            next_token = int(seq.prompt[end]) if end < len(seq.prompt) else -1
            return Chunk(flags | PREFILL_PROMPT_LOGPROBS, next_token, num_top)
        if self.num_candidates and flags:
            return Chunk(flags | PREFILL_CANDIDATES, -1, self.num_candidates)
        return Chunk(flags)

    def side_target(self, seq: Prompted, chunk: Chunk, start: int, end: int) -> SideTarget | None:
        if chunk.flags & PREFILL_PROMPT_LOGPROBS:
            return SideTarget(seq.owner, seq.request_id, start + 1)
        return SideTarget(seq.owner, seq.request_id, end) if chunk.flags & PREFILL_CANDIDATES else None


def asked(
    task: Generate, ids: np.ndarray, limits: EngineLimits, eos_token_ids: tuple[int, ...], processors: ProcessorsInfo | None
) -> Asked:
    """The sequences of a request for continuations of the prompt `ids`. Raises Refused."""
    params, resume, candidates = task.params, task.resume, task.candidates
    if not limits.generates:
        raise Refused("invalid", f"this engine does not generate; it has the tasks {', '.join(limits.tasks)}")
    _check(task, limits, processors)
    room = output_room(len(ids), limits.max_model_len, params.max_tokens)
    if room < 1:
        raise Refused(
            "too_long",
            f"the prompt is {len(ids)} tokens long; with at least one output token "
            f"at most {longest_prompt(limits.max_model_len)} fit the context of {limits.max_model_len}",
        )
    limit = output_limit(params.max_tokens, room)
    outputs = outputs_so_far(task, limit, limits.vocab_size)
    stop_ids, ends = _stop_ids(params, eos_token_ids)
    is_processed = processors is not None and (processors.all_requests or bool(params.extra_args))
    num_candidates = candidates.num if candidates is not None else 0
    seed = resume.seed if params.seed is None and resume is not None else params.seed
    return Asked(
        task=GenerateTask(params, stop_ids, sorted(ends), is_processed, num_candidates),
        prompts=dict.fromkeys(outputs if resume is not None else range(params.n), ids),
        limit=limit,
        outputs=outputs,
        seed=seed,
        # n children share their prompt's blocks even if prefixes are not cached: they then have a salt of their own, which no
        # later request gets, whatever its id
        shares=params.n > 1 or candidates is not None,
        search=candidates.search if candidates is not None else None,
        may_hit=task.may_hit,
    )


def _check(task: Generate, limits: EngineLimits, processors: ProcessorsInfo | None) -> None:
    try:
        check_against(task.params, vocab_size=limits.vocab_size, max_logprobs=limits.max_logprobs)
    except ValueError as error:
        raise Refused("invalid", str(error)) from None
    if task.candidates is not None:
        _check_candidates(task.candidates, task.params)
    if task.params.extra_args and processors is None:
        raise Refused("invalid", "vllm_xargs (extra_args) need an engine that was started with --logits-processors")


def _check_candidates(candidates: Candidates, params: SamplingParams) -> None:
    if not 1 <= candidates.num <= MAX_CANDIDATES:
        raise Refused("invalid", f"candidates must be between 1 and {MAX_CANDIDATES}, got {candidates.num}")
    if params.n != 1 or params.max_tokens != 1 or params.prompt_logprobs is not None:
        raise Refused("invalid", "candidates need n = 1, max_tokens = 1 and no prompt_logprobs")


def _stop_ids(params: SamplingParams, eos_token_ids: tuple[int, ...]) -> tuple[frozenset[int], frozenset[int]]:
    """(the request's own stop ids, every id that ends it)."""
    stop_ids = frozenset(params.stop_token_ids or ())
    ends = stop_ids if params.ignore_eos else stop_ids.union(eos_token_ids)
    if params.min_tokens > 0 and params.allowed_token_ids and ends.issuperset(params.allowed_token_ids):
        raise Refused("invalid", "allowed_token_ids holds only ids that min_tokens forbids")
    return stop_ids, ends
