"""Figures that --per-request-spec-decode-metrics adds to an answer: how its drafts fared."""

import msgspec


class SpeculativeDecoding(msgspec.Struct, frozen=True, kw_only=True):
    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    acceptance_histogram_by_draft_length: dict[int, list[int]]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    per_step_accepted: list[int] | msgspec.UnsetType = msgspec.UNSET
    per_step_drafted: list[int] | msgspec.UnsetType = msgspec.UNSET


class AnswerMetrics(msgspec.Struct, frozen=True):
    speculative_decoding: SpeculativeDecoding
