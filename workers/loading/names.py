"""The names of a family's tensors in its checkpoints, where they are not those of the model: `CheckpointNames`.

Within a layer, modules bear the checkpoint's names (models/); here are the few around the layers, several spellings of them,
and what a checkpoint holds that is not served: vision towers, buffers of old. weights.py renames what it reads,
models/family_table.py asks of a layer's quantization by both names.
"""

from collections.abc import Iterable
from typing import NamedTuple

BARE = ("embed_tokens.", "layers.", "norm.")  # of a decoder that was saved without the model around it


class CheckpointNames(NamedTuple):
    """`prefixes`: (in the checkpoint, in the model), all applied in this order.

    `ignored`: prefixes, or suffixes if they begin with a dot, of names in the checkpoint. `bare`: beginnings of names that
    the model has behind `model.`. `inner`: as prefixes, of a part within a name.
    """

    prefixes: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    bare: tuple[str, ...] = BARE
    inner: tuple[tuple[str, str], ...] = ()

    def is_ignored(self, name: str) -> bool:
        return any(name.endswith(part) if part.startswith(".") else name.startswith(part) for part in self.ignored)

    def in_model(self, name: str) -> str:
        """Of a tensor in the checkpoint."""
        for theirs, ours in self.prefixes:
            if name.startswith(theirs):
                name = ours + name.removeprefix(theirs)
        for theirs, ours in self.inner:
            name = name.replace(theirs, ours)
        return f"model.{name}" if name.startswith(self.bare) else name

    def in_checkpoint(self, name: str) -> Iterable[str]:
        """What a layer of this name in the model may be called there, the name itself first."""
        names = {f"{name}.": None}  # as its tensors begin: a prefix may be all of it
        for theirs, ours in self.inner:
            names |= {other.replace(ours, theirs): None for other in names}
        for theirs, ours in reversed(self.prefixes):
            names |= {theirs + other.removeprefix(ours): None for other in names if other.startswith(ours)}
        return [other.removesuffix(".") for other in names]
