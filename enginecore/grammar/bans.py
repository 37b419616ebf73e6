"""Bans: what a request's other parameters forbid next, beside its grammar, known when some of its drafts are. No I/O.

The sampler forbids the same (kernels/sampling/). Here it is found out whether the grammar and these together leave any token.
"""

from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import numpy as np

from quire.enginecore.grammar.matchers import stop_bits
from quire.enginecore.scheduling.sequence import Sequence
from quire.ipc.step.sections import MAX_BAD_WORD_TOKENS


class Bans(NamedTuple):
    stop_ids: SequenceOf[int]  # that min_tokens forbids
    min_len: int  # the length below which it does
    bad_words: SequenceOf[SequenceOf[int]]
    length: int  # of all known tokens
    outputs: list[int]  # the last of the output's known tokens

    def behind(self, drafts: list[int]) -> list[int]:
        """The ids that may not follow the known tokens and these drafts."""
        banned = list(self.stop_ids) if self.length + len(drafts) < self.min_len else []
        outputs = (self.outputs + drafts)[-MAX_BAD_WORD_TOKENS:]
        for word in self.bad_words:
            before = len(word) - 1
            if before == 0 or outputs[-before:] == word[:-1]:
                banned.append(word[-1])
        return banned


def bans_of(seq: Sequence, known: np.ndarray, num_words: int) -> Bans | None:
    """None if there can be none; also sets the constraint's `allowed`, uint32 [num_words]. known: all ids of the sequence."""
    p, c = seq.task.sampling, seq.constraint
    if not p.needs_logits_processors:
        return None
    if p.allowed_token_ids and c.allowed is None:
        c.allowed = np.zeros(num_words, np.uint32)
        words, bits = stop_bits(p.allowed_token_ids)
        c.allowed[words] = bits
    outputs = known[len(seq.prompt) :][-MAX_BAD_WORD_TOKENS:].tolist()
    return Bans(seq.task.min_tokens_stop_ids, seq.min_len, p.bad_words_token_ids or (), len(known), outputs)
