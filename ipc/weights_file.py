"""Find the file with a model's weights in its folder, if no index lists several.

Three callers read it: the core, before it starts workers (enginecore/loading/model_files.py), workers
(workers/loading/files.py), and `quire estimate`.
"""

import re
from pathlib import Path

# second copies of the weights, LoRA adapters, and parts of several files without their index
_OTHERS = re.compile(r"consolidated|adapter|.*-\d+-of-\d+\.safetensors")


def weights_file(folder: Path) -> Path | None:
    """model.safetensors, or the only weights file of another name (AutoGPTQ wrote gptq_model-4bit-128g.safetensors)."""
    if (usual := folder / "model.safetensors").is_file():
        return usual
    found = [path for path in folder.glob("*.safetensors") if path.is_file() and not _OTHERS.match(path.name)]
    return found[0] if len(found) == 1 else None
