"""A conversation on its way to the engine: a checked ChatRequest becomes a prompt, a plan of its output, and SamplingParams.

/v1/chat/completions, /v1/responses and /v1/messages share it; the latter two translate their bodies into a ChatRequest. This
file does not know the answer's shape.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from quire.frontend.client.beam_search import BeamStream
from quire.frontend.client.media import PlacedItem
from quire.frontend.http.api.bodies.checked import CheckedRequest, add_bad_words, check_request
from quire.frontend.http.api.bodies.params import make_params
from quire.frontend.http.api.bodies.request_media import RequestMedia
from quire.frontend.http.api.bodies.schemas import ChatRequest, Json
from quire.frontend.http.api.output_plan import Plan, chat_plan, take_tools
from quire.frontend.http.api.prompt import chat_prompt, num_kept
from quire.frontend.http.api.prompt_run import PromptRun, submit
from quire.frontend.http.api.services import Services
from quire.frontend.http.api.tools.tool_use import ToolUse
from quire.frontend.http.protocol.errors import ApiError
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.sampling import SamplingParams


class PlannedChat(NamedTuple):
    """A prompt and the plan of its output. plan: None if the output is plain text. marks: as in TokenInputs. items: media."""

    text: str
    token_ids: list[int]
    plan: Plan | None
    marks: tuple[int, ...]
    items: tuple[PlacedItem, ...]


class PreparedChat(NamedTuple):
    """A PlannedChat with its SamplingParams and the CheckedRequest that they were made of."""

    text: str
    token_ids: list[int]
    plan: Plan | None
    marks: tuple[int, ...]
    items: tuple[PlacedItem, ...]
    checked: CheckedRequest
    params: SamplingParams


def check_chat(body: ChatRequest, tokenizer: Tokenizer, num_logprobs: int | None) -> CheckedRequest:
    """num_logprobs: alternatives to return beside each token; None for no log-probabilities. Raises ApiError 400."""
    tools = take_tools(body)
    newer = body.max_completion_tokens is not None  # OpenAI's newer name wins
    checked = check_request(
        body,
        tokenizer,
        max_tokens=body.max_completion_tokens if newer else body.max_tokens,
        max_tokens_field="max_completion_tokens" if newer else "max_tokens",
        num_logprobs=num_logprobs,
        prompt_field="messages",
    )
    checked.tools = tools
    return checked


async def prepare_chat(
    services: Services, body: ChatRequest, checked: CheckedRequest, media: RequestMedia | None = None, **options: Any
) -> PreparedChat:
    """media, options: as for `plan_chat`. Raises ApiError 400, TooLong, MediaBusy."""
    client = services.client
    if media is not None:
        media.salt = checked.terms.salted(body.cache_salt or "")
    max_model_len = client.welcome.limits.max_model_len
    await add_bad_words(checked, client.tokenizer)
    keep = num_kept(body, max_model_len, checked.max_tokens)
    chat = await plan_chat(services, body, checked.tools, keep=keep, owner=checked.terms.name, media=media, **options)
    if media is not None:
        media.release()
    return PreparedChat(*chat, checked, make_params(checked, len(chat.token_ids), max_model_len, chat.plan))


async def plan_chat(
    services: Services,
    body: ChatRequest,
    tools: ToolUse | None,
    *,
    keep: int | None = None,
    owner: str = "",
    thinks: bool = True,
    may_not_reason: bool = False,
    instead: Callable[[list[Json]], list[Json] | None] | None = None,
    media: RequestMedia | None = None,
) -> PlannedChat:
    """Make the prompt and plan its output. keep: how many tokens of the prompt to keep (None: all). owner: of its key.

    thinks, may_not_reason: as for `chat_plan`. instead: given messages that the template refuses, returns others to try, or
    None. media: of the request, if its messages may hold any. Raises ApiError 400, TooLong, MediaBusy.
    """
    client = services.client
    arguments = client, body, services.trust_request_chat_template, keep
    options: dict[str, Any] = {"owner": owner, "render": services.render_own, "media": media}
    try:
        prompt, ids = await chat_prompt(*arguments, **options)
    except ApiError:
        if instead is None or (messages := instead(body.messages)) is None:
            raise
        body.messages = messages
        prompt, ids = await chat_prompt(*arguments, **options)
    plan = chat_plan(services.parsers, body, tools, client.tokenizer, prompt, thinks, may_not_reason)
    return PlannedChat(prompt.text, ids, plan, prompt.marks, prompt.items)


def submit_chat(services: Services, body: ChatRequest, chat: PreparedChat, name: str) -> PromptRun:
    """Send the prompt to the engine. Raises ClientErrors."""
    run = submit(services.client, body, chat.token_ids, chat.params, chat.checked, name, marks=chat.marks, items=chat.items)
    if chat.plan is not None and not isinstance(run.stream, BeamStream):  # a search of beams is not streamed
        chat.plan.show_markers(run.stream)
    return run
