"""`python -P -m quire.enginecore.loading.convert_tokenizer FOLDER OUT`: OUT/tokenizer.json from another format.

model_files.py runs it as a process of its own, because transformers takes seconds to load and pulls in torch.
It reads only the folder (no network), and runs no code from it. The last line on standard error says what went wrong.
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
    except Exception as error:  # any error that a file of the user's makes transformers raise is shown to the user
        print(" ".join(f"{type(error).__name__}: {error}".split()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
