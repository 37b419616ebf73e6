"""How many prompt tokens a step computes beside decode rows, which wait for its end: pure functions."""

MIXED_STEP_TOKENS = 256
LARGE_BYTES = 16 * 10**9  # weights of an 8B model in 16 bits


def mixed_step_tokens(weights_bytes: int, device: str) -> int:
    """Tokens of a step that takes not much longer than decoding: on a GPU, as long as 256 tokens of an 8B model take.

    On an H200 that is 7 ms, while 64 decode rows take 5. weights_bytes: with 16-bit weights.
    """
    return max(MIXED_STEP_TOKENS, MIXED_STEP_TOKENS * LARGE_BYTES // weights_bytes) if device == "cuda" else MIXED_STEP_TOKENS


def prefill_budget(
    num_decode: int, num_streams: int, num_new_streams: int, num_tokens: int, most: int, target: int, least: int = 0
) -> int:
    """Prompt tokens, 1 to `most`, of a step with num_decode > 0 decode rows, if num_tokens prompt tokens could be computed.

    Prompts are spread over equal steps of about `target` tokens, including decode rows; at least half of it is for prompts. If
    more streams wait for their first token (num_new_streams) than for their next (num_streams), all prompt tokens go at once;
    and if many wait, half of them do: then throughput counts. Requests that are read only at their end are not streams. least:
    tokens that go together.
    """
    if num_new_streams > num_streams or not num_streams:
        return most
    few = max(target - num_decode, target // 2, 1)
    steps = -(-10 * num_tokens // (11 * few)) or 1  # rather a tenth more than one step for the rest
    return min(most, max(-(-num_tokens // steps), num_tokens // 2, least) or few)
