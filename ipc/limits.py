"""Room for tokens: how many may follow a prompt within EngineLimits.max_model_len. The one place where it is computed.

Each caller decides what to do about too little room: the HTTP routes refuse a request for more tokens than there is room for
(frontend/http/api/bodies/params.py), the Python client cuts max_tokens (async_client.py), and the core, which trusts neither,
refuses a prompt without room and cuts max_tokens as well (enginecore/intake.py).
"""


def output_room(num_prompt_tokens: int, max_model_len: int, max_tokens: int | None = None) -> int:
    """Most tokens that can follow a prompt of this length; below 1 the prompt cannot be run.

    max_tokens: what the request asks for. A single token is sampled and never computed, so it needs no place in the context:
    the prompt before it may fill the context.
    """
    room = max_model_len - num_prompt_tokens
    return 1 if room == 0 and max_tokens == 1 else room


def longest_prompt(max_model_len: int) -> int:
    """Most tokens of a prompt that leaves room for one more."""
    return max_model_len - 1


def output_limit(max_tokens: int | None, room: int) -> int:
    """Most tokens that a request with this max_tokens (None: as many as fit) can produce in this room."""
    return room if max_tokens is None else min(max_tokens, room)
