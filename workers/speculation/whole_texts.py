"""Which block table of a model reads whole sequences, as drafters need it."""

from quire.ipc.messages.workers import FullAttention
from quire.workers.attention.kv_cache import KVCache
from quire.workers.models.config import ModelConfigError


def full_attention_group(cache: KVCache) -> int:
    """The index of the KV group with full attention. Raises ModelConfigError if there is none."""
    groups = [number for number, kind in enumerate(cache.kinds) if isinstance(kind, FullAttention)]
    if not groups:
        raise ModelConfigError("--speculative-config needs a layer of full attention, and this model has none: leave it out")
    return groups[0]
