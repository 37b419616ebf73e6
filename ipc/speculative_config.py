"""SpeculativeConfig: what drafts tokens, and how many of them. It is made of the options of --speculative-config.

The options have vLLM's names; what they mean, and which are refused, is in speculative_options.py. The struct is a part of
EngineConfig: the scheduler reads the bounds, and workers the drafter's settings. None in its place means no speculation.
"""

from typing import Literal

import msgspec

MAX_SPECULATIVE_TOKENS = 15  # drafts of a sequence in a step: a window has 16 tokens
MODEL_DRAFTS = 7  # of a draft model, by default
BUNDLED_DRAFTS = 3  # of the bundled model's drafters
MAX_NGRAM = 32


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of speculation, all of them decided."""

    method: Literal["ngram", "draft_model", "eagle3", "mtp"]
    # The draft model or EAGLE-3 head, a folder or hub id. The daemon makes it a folder, and it is the model's own for mtp.
    # None but for ngram and mtp: the drafter of the bundled model.
    model: str | None = None
    revision: str | None = None  # branch, tag or commit of its hub repository
    quantization: str | None = None  # as --quantization, for its weights
    max_model_len: int | None = None  # longest sequence that it drafts for; None: as long as its own context
    num_speculative_tokens: int = MAX_SPECULATIVE_TOKENS  # drafts of a sequence in a step, 1 to 15
    asked_tokens: int | None = None  # what was asked for instead, if it was more
    prompt_lookup_min: int = 5  # tokens; the shortest suffix of the text that is searched for in it
    prompt_lookup_max: int = 5  # and the longest
    enable_adaptive_verification: bool = True  # False: windows are as long as the other fields allow, whether they pay or not
    # (first number of sequences, last one, most drafts of each): rising from 1; between and behind ranges, the last one holds.
    num_speculative_tokens_per_batch_size: list[tuple[int, int, int]] = []
    disable_by_batch_size: int | None = None  # no drafts in steps of more sequences
    # For benchmarks: the probability that the first i + 1 drafts are all accepted, for each i, whatever they are. []: not so.
    synthetic_acceptance_rates: list[float] = []

    def most_drafts(self, num_sequences: int) -> int:
        """The most drafts of one sequence in a step that has `num_sequences` of them."""
        if self.disable_by_batch_size is not None and num_sequences > self.disable_by_batch_size:
            return 0
        most = self.num_speculative_tokens
        for first, _, allowed in self.num_speculative_tokens_per_batch_size:
            if first <= num_sequences:
                most = min(allowed, self.num_speculative_tokens)
        return most
