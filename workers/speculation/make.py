"""Which drafter an engine uses."""

from types import ModuleType

from quire.ipc.speculative_config import SpeculativeConfig
from quire.workers.attention.kv_cache import KVCache
from quire.workers.speculation.draft_model import DraftDevice, DraftModelDrafter
from quire.workers.speculation.drafter import Drafter
from quire.workers.speculation.loaded import DraftModel
from quire.workers.speculation.ngram import NgramDrafter


def make_drafter(
    config: SpeculativeConfig | None, cache: KVCache, ngram: ModuleType, draft: tuple[DraftModel, DraftDevice] | None
) -> Drafter:
    """The drafter that an engine is configured to use. ngram: the device's kernels. draft: of a draft model.

    Raises ModelConfigError if the model has no layer of full attention.
    """
    if config is None:
        return Drafter()
    return NgramDrafter(config, cache, ngram) if draft is None else DraftModelDrafter(config, cache, *draft)
