"""`metrics` of an answer: how its drafts fared, under vLLM's names, where --per-request-spec-decode-metrics asks for it."""

from collections.abc import Sequence

import msgspec

from quire.frontend.http.api.bodies.draft_metrics import AnswerMetrics, SpeculativeDecoding
from quire.frontend.http.api.prompt_run import PromptRun
from quire.ipc.messages.frontend import DraftsTold


def draft_metrics(runs: Sequence[PromptRun], told: DraftsTold | None) -> AnswerMetrics | msgspec.UnsetType | None:
    """None for an answer of several sequences; nothing at all unless the engine tells drafts."""
    if told is None:
        return msgspec.UNSET
    if len(runs) != 1 or runs[0].params.n != 1:
        return None
    steps = runs[0].stream.metrics.drafts or []
    most = told.num_speculative_tokens
    counts, by_length = [0] * (most + 1), dict[int, list[int]]()
    for verified, accepted in steps:
        counts[accepted] += 1
        by_length.setdefault(verified, [0] * (verified + 1))[accepted] += 1
    num_verified, num_accepted = sum(v for v, _ in steps), sum(a for _, a in steps)
    by_step = {"per_step_accepted": [a for _, a in steps], "per_step_drafted": [v for v, _ in steps]} if told.by_step else {}
    return AnswerMetrics(
        SpeculativeDecoding(
            mean_acceptance_length=1 + num_accepted / max(1, len(steps)),
            draft_acceptance_rate=num_accepted / max(1, num_verified),
            acceptance_histogram=counts,
            acceptance_histogram_by_draft_length=dict(sorted(by_length.items())),
            num_spec_steps=len(steps),
            num_accepted_draft_tokens=num_accepted,
            num_draft_tokens=num_verified,
            num_spec_tokens=most,
            **by_step,
        )
    )
