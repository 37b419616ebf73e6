"""`quire models`: lists a server's models, or, with --cached, the hub's models on this machine's disk."""

import argparse
import sys
from typing import Any

from quire.frontend.cli.api_address import ChatError
from quire.frontend.cli.api_client import server_of

_GB = 10**9


def models(args: argparse.Namespace) -> int:
    """Prints a table; returns the exit code."""
    try:
        rows = _cached(args.download_dir) if args.cached else [_card(card) for card in server_of(args).model_cards()]
    except (ChatError, OSError) as error:
        print(f"quire models: {error}", file=sys.stderr)
        return 1
    header = ("model", "size", "revisions") if args.cached else ("model", "length", "root")
    if not rows:
        print("quire models: there is none", file=sys.stderr)
        return 1
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, *rows):
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _card(card: dict[str, Any]) -> tuple[str, str, str]:
    length = card.get("max_model_len")
    return str(card["id"]), "" if length is None else str(length), str(card.get("root") or "")


def _cached(folder: str | None) -> list[tuple[str, str, str]]:
    """Models in the hub's cache that have safetensors files. Raises OSError."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir(folder).repos
    except (CacheNotFound, ValueError) as error:
        raise OSError(str(error).splitlines()[0]) from None
    rows = []
    for repository in sorted(repositories, key=lambda repository: repository.repo_id):
        files = [file.file_name for revision in repository.revisions for file in revision.files]
        if repository.repo_type == "model" and any(name.endswith(".safetensors") for name in files):
            names = sorted(name for revision in repository.revisions for name in revision.refs)
            size = f"{repository.size_on_disk / _GB:.1f} GB"
            rows.append((repository.repo_id, size, ", ".join(names) or str(len(repository.revisions))))
    return rows
