"""Which drafter an engine uses."""

from types import ModuleType
from typing import TYPE_CHECKING

from quire.workers.speculation.draft_model import DraftModelDrafter
from quire.workers.speculation.drafter import Drafter
from quire.workers.speculation.ngram import NgramDrafter

if TYPE_CHECKING:
    from quire.workers.devices.device import Device


def make_drafter(device: "Device", ngram: ModuleType, draft_passes: ModuleType) -> Drafter:
    """The drafter that an engine is configured to use. ngram, draft_passes: the device's kernels.

    Raises ModelConfigError if the model has no layer of full attention.
    """
    ctx = device.ctx
    if ctx.speculation is None:
        return Drafter()
    if ctx.draft_model is not None:
        return DraftModelDrafter(device, ctx.speculation, ctx.draft_model, draft_passes)
    return NgramDrafter(ctx.speculation, ctx.cache, ngram)
