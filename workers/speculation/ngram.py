"""NgramDrafter: drafts what followed when the end of a sequence's text occurred before in it (prompt lookup decoding).

It keeps an int32 id for each token of the KV cache, at the slot of a group with full attention. So a sequence's block table
reads its whole text, whichever request has computed it. Without a model of its own it costs little, and helps where outputs
repeat their prompts: edits, quotes, code, extraction.
"""

from types import ModuleType

import torch

from quire.ipc.speculative_config import SpeculativeConfig
from quire.kernels.step.tables import SlotTables, StepBuffers
from quire.workers.attention.kv_cache import KVCache
from quire.workers.speculation.drafter import Drafter
from quire.workers.speculation.whole_texts import full_attention_group


class NgramDrafter(Drafter):
    def __init__(self, config: SpeculativeConfig, cache: KVCache, kernels: ModuleType) -> None:
        """kernels: kernels/speculation/ngram, or its functions for a CPU."""
        self._config, self._cache, self._kernels, self._group = config, cache, kernels, full_attention_group(cache)
        self._text = torch.zeros(0, dtype=torch.int32)

    def extend(self, step: StepBuffers, num_tokens: int) -> None:
        self._kernels.write_text(step, self._text_on(step.input_ids.device), self._group, num_tokens)

    def draft(self, tables: SlotTables, step: StepBuffers, num_rows: int) -> None:
        c = self._config
        self._kernels.draft_ngrams(
            tables,
            step,
            self._text_on(tables.last_token.device),
            self._group,
            num_rows,
            block_size=self._cache.block_size,
            min_n=c.prompt_lookup_min,
            max_n=c.prompt_lookup_max,
            num_drafts=c.num_speculative_tokens,
        )

    def _text_on(self, device: torch.device) -> torch.Tensor:
        """The ids of the cache's slots, int32 [blocks * block size]; made anew if the cache was allocated meanwhile."""
        size = self._cache.num_blocks * self._cache.block_size
        if len(self._text) != size:
            self._text = torch.zeros(size, dtype=torch.int32, device=device)
        return self._text
