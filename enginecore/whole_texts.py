"""The tokens of a step: an encoder computes texts whole, so its steps have room for the longest one. Called by daemon.py."""

import logging

from quire.ipc.config import EngineConfig
from quire.ipc.encoders import MOST_TOKENS
from quire.ipc.memory_plan import default_max_num_batched_tokens

log = logging.getLogger("quire.enginecore")


def step_tokens(
    config: EngineConfig, is_encoder: bool, is_gpu: bool, max_model_len: int, whole_image: int = 0
) -> tuple[int, int]:
    """(tokens of a step, the longest sequence). By default an encoder's step has room for any text, up to MOST_TOKENS, and that
    of a model in which an image's tokens see each other for any image, of `whole_image` tokens. Raises ValueError for a flag
    that leaves no room for one."""
    least = 0 if config.language_model_only else min(whole_image, max_model_len)
    tokens = config.max_num_batched_tokens or max(default_max_num_batched_tokens(is_gpu), least)
    if tokens < least:
        raise ValueError(
            f"--max-num-batched-tokens {tokens} is less than an image's {least} tokens, which see each other, so that one step "
            f"must compute all of them: {least} works, or --language-model-only"
        )
    if not is_encoder:
        return tokens, max_model_len
    if config.max_num_batched_tokens is None:
        tokens = max(tokens, min(max_model_len, MOST_TOKENS))
    if tokens < max_model_len:
        log.warning("texts have at most %d tokens, as a step has: --max-num-batched-tokens changes that", tokens)
    return tokens, min(max_model_len, tokens)
