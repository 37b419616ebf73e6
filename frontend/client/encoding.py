"""A prompt's text to token ids without keeping the event loop: short texts here, long ones in a thread."""

from quire.frontend.client.stream import TooLong
from quire.frontend.client.turns import in_native_thread
from quire.frontend.text.tokenizer import LONG_TEXT, Tokenizer, TooManyTokens

MOST_TOKENS = 1 << 19  # of one text, where the context is no longer: a list of so many takes 30 ms to make


async def encode_prompt(tokenizer: Tokenizer, text: str, add_special_tokens: bool, max_model_len: int) -> list[int]:
    """Raises TooLong for what can never fit into the context: it is not tokenized, or not made a list of."""
    if len(text) <= LONG_TEXT:
        return tokenizer.encode(text, add_special_tokens)
    if len(text) > max_model_len * tokenizer.max_token_chars:
        raise TooLong(f"the prompt has {len(text)} characters, more than {max_model_len} tokens can hold")
    try:
        return await in_native_thread(tokenizer.encode, text, add_special_tokens, max(max_model_len, MOST_TOKENS))
    except TooManyTokens as error:
        raise TooLong(f"the prompt cannot be used: {error}") from None
