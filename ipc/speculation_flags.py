"""The flags of speculation, and the settings beside which there is none."""

from collections.abc import Callable
from typing import Any

from quire.ipc.process.flags import JsonMember, JsonObject, human_int

SHORT_FLAGS = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}  # name: key


def check_speculation(config: Any) -> None:
    """Check an EngineConfig. Raises ValueError."""
    if config.speculative_config is None:
        return
    drafts = config.speculative_config
    if drafts.method in ("draft_model", "eagle3") and drafts.model is None and config.model is not None:
        raise ValueError(
            f"--speculative-config: {drafts.method} needs a model, a folder or hub id; the bundled model has its own"
        )
    if config.pipeline_parallel_size > 1:
        raise ValueError("--speculative-config does not work with --pipeline-parallel-size above 1")


def add_speculation_arguments(add: Callable[..., None]) -> None:
    add(
        "--speculative-config",
        "-sc",
        action=JsonObject,
        metavar="JSON",
        help='what drafts tokens and how many, with vLLM\'s keys, like {"method": "ngram", "num_speculative_tokens": 15}: a '
        "step verifies a sequence's drafts together, and answers do not change (default: no drafts)",
    )
    add(
        "--per-request-spec-decode-metrics",
        choices=["none", "summary", "detailed"],
        help="whether answers of chats and completions say how their drafts fared, in total, or also by step",
    )
    for name, (kind, metavar) in {
        "spec_method": (str, "METHOD"),
        "spec_model": (str, "MODEL"),
        "spec_tokens": (human_int, "N"),
    }.items():
        add(
            f"--{name.replace('_', '-')}",
            action=JsonMember,
            dest="speculative_config",
            key=SHORT_FLAGS[name],
            type=kind,
            metavar=metavar,
            default=None,
            help=f"short for --speculative-config.{SHORT_FLAGS[name]} (default: not set)",
        )
