"""The flags of what a model is served for: to generate, or to make vectors and scores. Names and values are vLLM's."""

from collections.abc import Callable
from typing import Any, Literal, get_args

from quire.ipc.process.flags import JsonObject

Runner = Literal["auto", "generate", "pooling"]
Convert = Literal["auto", "none", "embed", "classify"]


def check_pooling_flags(runner: str, convert: str, pooler_config: dict[str, Any]) -> None:
    """Raises ValueError."""
    if pooler_config and runner == "generate" and convert in ("auto", "none"):
        raise ValueError("--pooler-config is of a model that pools: add --convert embed, or --runner pooling")


def add_pooling_arguments(add: Callable[..., None]) -> None:
    add(
        "--runner",
        choices=list(get_args(Runner)),
        help="what the model is served for: generate (text), pooling (vectors and scores), or auto (by its architecture, and "
        "pooling if it has sentence-transformers' modules.json)",
    )
    add(
        "--convert",
        choices=list(get_args(Convert)),
        help="what a model that pools makes: embed (vectors), classify (scores), none, or auto (by its architecture); with "
        "embed a model that generates makes vectors, too",
    )
    add(
        "--pooler-config",
        "--override-pooler-config",
        action=JsonObject,
        metavar="JSON",
        help="how the model pools: seq_pooling_type (LAST, MEAN or CLS) and use_activation, which normalizes vectors "
        "(default: as the checkpoint says)",
    )
