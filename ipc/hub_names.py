"""The hub id that a user means: addresses of the hub are taken, and names of other programs get a line that helps.

Called by the core (enginecore/loading/model_files.py) and by `quire estimate`.
"""

import re

_ADDRESS = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?:models/)?([^/?#]+/[^/?#]+)(/[^?#]*)?(?:[?#].*)?")
_OF_MAIN = ("", "/", "/tree/main", "/tree/main/")
# OWNER/NAME:Q4_K_M, as Ollama and llama.cpp have it; also names of llama.cpp's other types
_QUANT = re.compile(r"([\w.-]+(?:/[\w.-]+)?):((?:I?Q\d\w*|F16|F32|BF16|MXFP4\w*|latest|UD-\w+))", re.IGNORECASE)
SAFETENSORS = "Quire reads safetensors in Hugging Face's format"


def hub_id_of(name: str) -> str:
    """The hub id of an address of the hub's; any other name as it is.

    Raises ValueError, with a text for users, for addresses and names that mean something else than a repository.
    """
    if (address := _ADDRESS.fullmatch(name)) is not None:
        if (address[2] or "") not in _OF_MAIN:
            raise ValueError(f"{name} is part of the repository {address[1]}: give {address[1]}, and --revision for a branch")
        return address[1]
    if (quant := _QUANT.fullmatch(name)) is not None:
        raise ValueError(
            f"{name} names a GGUF file of {quant[1]} ({quant[2]}), which is not read: {SAFETENSORS}. Give the repository that "
            "the file was made from, or one with quantized safetensors (AWQ, GPTQ, FP8)"
        )
    return name
