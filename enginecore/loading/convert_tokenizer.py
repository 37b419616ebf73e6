"""`python -P -m quire.enginecore.loading.convert_tokenizer FOLDER OUT`: OUT/tokenizer.json from another format.

A process of its own, run by model_files.py and gone when it is done, because transformers costs seconds and pulls torch in.
Reads only the folder (no network), and runs no code from it. The last line on standard error says what went wrong.
"""

import os
import sys


def main() -> int:
    folder, out = sys.argv[1:]
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder, use_fast=True, trust_remote_code=False, local_files_only=True
        )
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(f"{type(tokenizer).__name__} has no fast version")
        backend.save(os.path.join(out, "tokenizer.json"))
    except Exception as error:  # whatever a foreign file makes transformers raise is the user's to read
        print(" ".join(f"{type(error).__name__}: {error}".split()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
