"""`python -P -m quire.enginecore.loading.convert_tokenizer FOLDER OUT`: OUT/tokenizer.json from another format.

model_files.py runs it as a process of its own, because transformers takes seconds to load and pulls in torch.
It reads only the folder (no network), and runs no code from it. tiktoken_file.py reads a tiktoken.model. The last line on
standard error says what went wrong.
"""

import os
import re
import sys
from pathlib import Path

from quire.enginecore.loading import tiktoken_file

INSTALL = "install Quire's extra `sentencepiece` (pip install '.[sentencepiece]' in its folder)"
_TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")  # a token in base64, and its rank


def missing_packages(folder: Path) -> list[str]:
    """The packages that a folder's tokenizer.model needs and that are not installed; transformers would name others."""
    model = folder / "tokenizer.model"
    if not model.is_file() or any((folder / name).is_file() for name in ("vocab.json", "vocab.txt", "tekken.json")):
        return []
    with model.open("rb") as file:
        if _TIKTOKEN_LINE.fullmatch(file.readline(1 << 16)):
            return []  # transformers reads it by tiktoken, and says what it lacks
    missing = []
    try:
        import sentencepiece  # noqa: F401
    except ImportError:
        missing.append("sentencepiece")
    try:
        import google.protobuf  # noqa: F401
    except ImportError:
        missing.append("protobuf")
    return missing


def _convert_tiktoken(folder: Path, out: Path) -> int:
    try:
        tiktoken_file.tokenizer_of(folder).save(str(out / "tokenizer.json"))
    except Exception as error:  # `tokenizers` raises bare Exception
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


def main() -> int:
    folder, out = sys.argv[1:]
    os.environ["HF_HUB_OFFLINE"] = "1"
    if (Path(folder) / tiktoken_file.FILE).is_file():
        return _convert_tiktoken(Path(folder), Path(out))
    if missing := missing_packages(Path(folder)):
        print(f"tokenizer.model needs {' and '.join(missing)}: {INSTALL}", file=sys.stderr)
        return 1
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder, use_fast=True, trust_remote_code=False, local_files_only=True
        )
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(f"{type(tokenizer).__name__} has no fast version")
        backend.save(os.path.join(out, "tokenizer.json"))
    except Exception as error:  # any error that a file of the user's makes transformers raise is shown to the user
        print(" ".join(f"{type(error).__name__}: {error}".split()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
