"""The engine's flags of models that take items beside text."""

from collections.abc import Callable

from quire.ipc.process.flags import human_int


def check_media(encoder_cache_tokens: int | None) -> None:
    """Raises ValueError."""
    if encoder_cache_tokens is not None and encoder_cache_tokens < 1:
        raise ValueError("--encoder-cache-tokens must be at least 1")


def add_media_arguments(add: Callable[..., None]) -> None:
    add("--language-model-only", action="store_true", help="serve the text model alone: no encoder is loaded")
    add(
        "--encoder-cache-tokens",
        type=human_int,
        metavar="N",
        help="tokens of images: each device keeps the embeddings of so many (default: twice the largest image)",
    )
