"""Gives an adapter to the sequences of a request, before they run: from which position, and under which hashes. No I/O."""

from collections.abc import Iterable

import numpy as np

from quire.enginecore.adapters.registry import Adapter
from quire.enginecore.kv.pool import BlockHasher, Fork
from quire.enginecore.scheduling.sequence import Sequence


def give(sequences: Iterable[Sequence], adapter: Adapter, hasher: BlockHasher) -> None:
    """Let new sequences of one request hold an adapter, if it applies to them; their blocks then have other hashes."""
    part, prompt, start = b"adapter %d" % adapter.number, np.zeros(0, np.int32), None
    for seq in sequences:
        if seq.prompt is not prompt:
            prompt, start = seq.prompt, adapter.start_in(seq.prompt)
        if start is None:
            continue
        seq.adapter, seq.adapter_from = adapter, start
        if adapter.plan.invocation_tokens:
            # the same tokens may have another start in another prompt, if an answer has generated invocation tokens
            seq.blocks.fork = Fork(start // hasher.block_size, b"%b from %d" % (part, start))
        else:
            seq.blocks.root_hash = hasher.root(seq.blocks.root_hash, part)
