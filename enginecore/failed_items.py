"""The requests that have used an item which a worker could not encode: they must end, and no others.

The worker's rows of the item are zeros, so whatever was computed from them is wrong: the sequences that have read them, those
that have hit blocks of these sequences since, and the blocks themselves, which the prefix cache must not give to others. The
item's entry in the encoder cache goes, too: a request that comes later has the item encoded again. A failure is known before
the results of the first step that has read the rows are taken (encoded_steps.py), so none of them has been sent. Called by
requests.py.
"""

import logging
from typing import cast

from quire.enginecore.media.item_traffic import Failed
from quire.enginecore.scheduling.scheduler import Scheduler
from quire.enginecore.scheduling.sequence import Sequence
from quire.ipc.messages.workers import ItemFailed, ItemFault

log = logging.getLogger("quire.enginecore")

TEXTS: dict[ItemFault, str] = {
    "memory": "the model's encoder ran out of memory on an item of the prompt; a smaller one may work",
    "not_finite": "the model's encoder made values that are not finite of an item of the prompt",
    "error": "the model's encoder failed on an item of the prompt",
}


def failed_by(message: ItemFailed, scheduler: Scheduler) -> list[Failed]:
    """The requests that must end. Several ranks may tell of the same run: the first one counts."""
    entry = scheduler.items.cache.discard(message.number)
    if entry is None:
        return []
    readers = cast(dict[Sequence, int], entry.readers)
    wrong = set[int]()
    for seq, start in readers.items():
        wrong |= scheduler.kv.forget(seq.blocks, start)
    ended = {(seq.owner, seq.request_id): None for seq in readers if not seq.is_finished}
    for other in scheduler.slots.sequences:
        if other is not None and other not in readers and any(not wrong.isdisjoint(b) for b in other.blocks.blocks):
            first = min(i for blocks in other.blocks.blocks for i, block in enumerate(blocks) if block in wrong)
            scheduler.kv.forget(other.blocks, first * scheduler.kv.block_size)
            ended[other.owner, other.request_id] = None
    log.warning("worker %d could not encode an item (%s): %d requests end", message.rank, message.fault, len(ended))
    return [Failed(owner, request_id, "media_failed", TEXTS[message.fault]) for owner, request_id in ended]
