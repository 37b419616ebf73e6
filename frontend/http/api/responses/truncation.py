"""truncation: "auto": a conversation that does not fit into the context loses its oldest turns, as few as possible.

A turn is a user's message and all that follow it until the next one. System messages before the first turn are kept, and so is
the last turn: if that alone is too long, the request is refused as without truncation. No message is cut.
"""

import msgspec

from quire.frontend.client.stream import TooLong
from quire.frontend.http.api.bodies.request_media import RequestMedia
from quire.frontend.http.api.bodies.schemas import ChatRequest
from quire.frontend.http.api.output_plan import take_tools
from quire.frontend.http.api.prompt import chat_prompt
from quire.frontend.http.api.services import Services
from quire.ipc.limits import output_room


async def leave_out_oldest(services: Services, body: ChatRequest, owner: str, media: RequestMedia) -> None:
    """Shorten body.messages until the prompt leaves room for max_completion_tokens, or for one token."""
    take_tools(body)
    messages = body.messages
    turns = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if len(turns) < 2 or await _fits(services, body, owner, media):
        return
    kept = [message for message in messages[: turns[0]] if message["role"] in ("system", "developer")]
    low, high = 1, len(turns) - 1  # the first turn to keep is in [low, high]
    while low < high:
        middle = (low + high) // 2
        shorter = msgspec.structs.replace(body, messages=kept + messages[turns[middle] :])
        if await _fits(services, shorter, owner, media):
            high = middle
        else:
            low = middle + 1
    body.messages = kept + messages[turns[low] :]


async def _fits(services: Services, body: ChatRequest, owner: str, media: RequestMedia) -> bool:
    try:
        trusts, render = services.trust_request_chat_template, services.render_own
        _, ids = await chat_prompt(services.client, body, trusts, owner=owner, render=render, media=media)
    except TooLong:
        return False
    return output_room(len(ids), services.limits.max_model_len) >= (body.max_completion_tokens or 1)
