"""Writes the parts of docs/*.md that are made from the code; `python docs/tools/pages.py --check` says which are stale.

A part stands between two comments in its page, <!-- made: NAME --> and <!-- end: NAME -->; the rest of the page is written by
hand. Parts are functions that return Markdown: api_part.py, configuration_part.py, memory_part.py, migration_part.py,
models_part.py, transformers_part.py.
Run it after a change of a route, a field, a flag or a formula; tests/docs/test_pages.py runs it, too.
"""

import argparse
import re
import sys
from pathlib import Path

import api_part
import configuration_part
import memory_part
import migration_part
import models_part
import transformers_part

DOCS = Path(__file__).parents[1]
PARTS = {
    "routes": api_part.routes,
    "fields": api_part.fields,
    "error-codes": api_part.error_codes,
    "flags-serve": configuration_part.serve,
    "flags-enginecore": configuration_part.enginecore,
    "flags-commands": configuration_part.commands,
    "templates": configuration_part.templates,
    "memory-examples": memory_part.examples,
    "transformers-models": transformers_part.models,
    "wrappers": models_part.wrappers,
    "vllm-commands": migration_part.commands,
    "vllm-flags": migration_part.flags,
    "vllm-routes": migration_part.routes,
    "vllm-fields": migration_part.fields,
    "vllm-python": migration_part.python,
    "vllm-metrics": migration_part.metrics,
}
_PART = re.compile(r"(<!-- made: ([\w-]+) -->\n).*?(<!-- end: \2 -->)", re.DOTALL)


def made(page: str) -> str:
    """A page's text with its parts as they should be."""
    return _PART.sub(lambda part: f"{part[1]}\n{PARTS[part[2]]().strip()}\n\n{part[3]}", page)


def main() -> int:
    """0, or with --check 1 if a page is stale."""
    parser = argparse.ArgumentParser(description="Write the parts of docs/*.md that are made from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is stale")
    check, stale = parser.parse_args().check, []
    for path in sorted(DOCS.glob("*.md")):
        text = path.read_text()
        if (new := made(text)) != text:
            stale.append(path.name)
            if not check:
                path.write_text(new)
    if stale:
        print(f"{'stale' if check else 'written'}: {', '.join(stale)}" + ("; run python docs/tools/pages.py" if check else ""))
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
