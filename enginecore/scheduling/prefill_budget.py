"""How much of the prompts a step computes beside decode rows, whose next token waits for it: pure functions."""

MIXED_STEP_TOKENS = 256
LARGE_BYTES = 16 * 10**9  # of weights: an 8B model in 16 bits


def mixed_step_tokens(weights_bytes: int, device: str) -> int:
    """Tokens of a step that takes not much longer than decoding does: on a GPU as long as 256 tokens of an 8B model do.

    On an H200 that is 7 ms, where 64 decode rows take 5. weights_bytes: of 16-bit weights.
    """
    return max(MIXED_STEP_TOKENS, MIXED_STEP_TOKENS * LARGE_BYTES // weights_bytes) if device == "cuda" else MIXED_STEP_TOKENS


def prefill_budget(num_decode: int, num_streams: int, num_new_streams: int, num_tokens: int, most: int, target: int) -> int:
    """Prompt tokens of a step with num_decode > 0 decode rows, where prompts with num_tokens could be computed; 1 to most.

    Prompts are spread over equal steps of about `target` tokens, decode rows included, at least half of it for prompts. All
    goes at once if more wait for their first token than for their next, and of much that waits half: then throughput counts.
    That is num_new_streams of the prompts, and num_streams of the rows: of the others somebody reads the end alone.
    """
    if num_new_streams > num_streams or not num_streams:
        return most
    few = max(target - num_decode, target // 2, 1)
    steps = -(-10 * num_tokens // (11 * few)) or 1  # rather a tenth more than one step for the rest
    return min(most, max(-(-num_tokens // steps), num_tokens // 2) or few)
