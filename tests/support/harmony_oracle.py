"""Asks openai-harmony what the cases of harmony_cases.py mean, and writes harmony_readings.json or compares with it.

    python tests/support/harmony_oracle.py          compares; ends with 1 if a reading differs
    python tests/support/harmony_oracle.py write    writes the file

The package takes its vocabulary from a host that builds may not reach. The same vocabulary is in npm's js-tiktoken, so it is
made from that. `make harmony-oracle` installs the package and runs this.
"""

import base64
import hashlib
import io
import json
import os
import re
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from harmony_cases import READINGS, cases

from quire.frontend.text.harmony.tokens import MARKERS

_PACKAGE = "https://registry.npmjs.org/js-tiktoken/-/js-tiktoken-1.0.21.tgz"
_SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"  # of o200k_base.tiktoken


def vocabulary() -> bytes:
    """o200k_base.tiktoken: a line for each token, with its bytes in base64 and its rank."""
    with urllib.request.urlopen(_PACKAGE, timeout=60) as answer:
        archive = tarfile.open(fileobj=io.BytesIO(answer.read()))
    source = archive.extractfile("package/dist/ranks/o200k_base.cjs")
    assert source is not None
    data = json.loads(re.sub(r"^module\.exports\s*=\s*|;\s*$", "", source.read().decode()))
    lines = []
    for line in data["bpe_ranks"].splitlines():
        _, start, *tokens = line.split(" ")
        lines += [(int(start) + i, token) for i, token in enumerate(tokens)]
    made = "".join(f"{token} {rank}\n" for rank, token in sorted(lines)).encode()
    assert hashlib.sha256(made).hexdigest() == _SHA256
    assert base64.b64decode(lines[0][1])
    return made


def readings(folder: Path) -> list[Any]:
    """A reading for each case: the messages, and why the package gave up, if it did."""
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(folder)
    from openai_harmony import HarmonyEncodingName, HarmonyError, Role, StreamableParser, load_harmony_encoding

    encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    result = []
    for pieces in cases():
        parser, problem = StreamableParser(encoding, role=Role.ASSISTANT, strict=False), None
        try:
            for piece in pieces:
                allowed = "all" if piece in MARKERS else set()
                for token in encoding.encode(piece.removeprefix("\x00"), allowed_special=allowed, disallowed_special=()):
                    parser.process(token)
            parser.process_eos()
        except HarmonyError as error:
            problem = "header" if "EOS while waiting" in str(error) else str(error)
        messages = [
            {
                "role": m.author.role.value,
                "channel": m.channel,
                "recipient": m.recipient,
                "text": "".join(c.text for c in m.content),
            }
            for m in parser.messages
        ]
        result.append({"messages": messages, "problem": problem})
    return result


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        given = os.environ.get("TIKTOKEN_ENCODINGS_BASE")
        if given is None:
            (Path(folder) / "o200k_base.tiktoken").write_bytes(vocabulary())
        found = readings(Path(given or folder))
    if sys.argv[1:] == ["write"]:
        READINGS.write_text("[\n" + ",\n".join(json.dumps(one, ensure_ascii=False) for one in found) + "\n]\n")
        return 0
    kept = json.loads(READINGS.read_text())
    different = [i for i, (a, b) in enumerate(zip(kept, found, strict=True)) if a != b]
    print(f"{len(found)} readings, {len(different)} differ from {READINGS.name}: {different[:20]}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
