"""Which drafter an engine uses."""

from types import ModuleType

from quire.ipc.speculative_config import SpeculativeConfig
from quire.workers.attention.kv_cache import KVCache
from quire.workers.speculation.drafter import Drafter, NoDrafter
from quire.workers.speculation.ngram import NgramDrafter


def make_drafter(config: SpeculativeConfig | None, cache: KVCache, ngram: ModuleType) -> Drafter:
    """The drafter that an engine is configured to use. ngram: the device's kernels. Raises ModelConfigError if the model has no
    layer of full attention."""
    return NoDrafter() if config is None else NgramDrafter(config, cache, ngram)
