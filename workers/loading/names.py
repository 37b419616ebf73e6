"""The names of a family's tensors in its checkpoints, if they differ from the model's: `CheckpointNames`.

Within a layer, modules have the checkpoint's names (models/). This file has the few names around the layers, with their
spellings, and the tensors that are not served: vision towers, old buffers. files.py renames the tensors that it finds;
models/family_table.py looks up a layer's quantization by both names.
"""

from collections.abc import Iterable
from typing import NamedTuple

BARE = ("embed_tokens.", "layers.", "norm.")  # in a decoder that was saved without the model around it


class CheckpointNames(NamedTuple):
    """`prefixes`: (in the checkpoint, in the model), all applied in this order.

    `ignored`: prefixes, or suffixes if they begin with a dot, of names in the checkpoint or in the model. `bare`: beginnings of
    names to which the model prepends `model.`. `inner`: like prefixes, but anywhere within a name. `torch_files`: whether
    pytorch_model.bin is read where there are no safetensors, by a reader that unpickles nothing (torch_file.py). `only`: the
    beginning of the model's names, where the checkpoint has another model beside it; "": all of the checkpoint is the model's.
    """

    prefixes: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    bare: tuple[str, ...] = BARE
    inner: tuple[tuple[str, str], ...] = ()
    torch_files: bool = False
    only: str = ""

    def is_ignored(self, name: str) -> bool:
        return any(name.endswith(part) if part.startswith(".") else name.startswith(part) for part in self.ignored)

    def in_model(self, name: str) -> str:
        """The name in the model of a tensor in the checkpoint."""
        for theirs, ours in self.prefixes:
            if name.startswith(theirs):
                name = ours + name.removeprefix(theirs)
        for theirs, ours in self.inner:
            name = name.replace(theirs, ours)
        return f"model.{name}" if name.startswith(self.bare) else name

    def in_checkpoint(self, name: str) -> Iterable[str]:
        """Names that a layer of this name in the model may have in the checkpoint, the name itself first."""
        names = {f"{name}.": None}  # with the dot, since a prefix may be the whole name
        for theirs, ours in self.inner:
            names |= {other.replace(ours, theirs): None for other in names}
        for theirs, ours in reversed(self.prefixes):
            names |= {theirs + other.removeprefix(ours): None for other in names if other.startswith(ours)}
        return [other.removesuffix(".") for other in names]
