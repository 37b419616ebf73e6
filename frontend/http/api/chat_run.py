"""A conversation on its way to the engine: from a ChatRequest to its prompt, its sampling and the plan of its output.

The part of /v1/chat/completions that other routes share, which translate their bodies into a ChatRequest. Nothing here knows
the answer's shape.
"""

from typing import NamedTuple

from quire.frontend.client.beam_search import BeamStream
from quire.frontend.http.api.bodies.fields import num_kept
from quire.frontend.http.api.bodies.params import SamplingRequest, encoded, prompt_text
from quire.frontend.http.api.bodies.schemas import ChatRequest
from quire.frontend.http.api.output_plan import OutputPlan
from quire.frontend.http.api.prompt_run import PromptRun
from quire.frontend.http.api.services import Services
from quire.frontend.http.api.submit import submit
from quire.frontend.http.api.tools.chat_tools import chat_plan, take_tools
from quire.ipc.sampling import SamplingParams


class PreparedChat(NamedTuple):
    """plan: None where the output is plain text."""

    text: str
    token_ids: list[int]
    params: SamplingParams
    plan: OutputPlan | None


async def prepare_chat(services: Services, body: ChatRequest, num_bytes: int, num_logprobs: int | None) -> PreparedChat:
    """num_bytes: of the request's body. num_logprobs: as the engine takes it. Raises ApiError 400."""
    client, limits = services.client, services.limits
    tokenizer = client.tokenizer
    tools = take_tools(body)
    newer = body.max_completion_tokens is not None  # OpenAI's newer name wins
    max_tokens = body.max_completion_tokens if newer else body.max_tokens
    sampling = SamplingRequest(
        body,
        tokenizer,
        limits.max_model_len,
        max_tokens=max_tokens,
        max_tokens_field="max_completion_tokens" if newer else "max_tokens",
        default_max_tokens=None,
        logprobs=num_logprobs,
    )
    await sampling.prepare()
    text = await prompt_text(body, tokenizer, services.trust_request_chat_template, num_bytes)
    keep = num_kept(body, limits.max_model_len, max_tokens)
    ids = await encoded(client, text, bool(body.add_special_tokens), keep, body.truncation_side)
    plan = chat_plan(services.parsers, body, tools, tokenizer, text)
    params = sampling.params(len(ids), "messages")
    return PreparedChat(text, ids, params if plan is None else plan.params(params), plan)


def submit_chat(services: Services, body: ChatRequest, chat: PreparedChat, name: str) -> PromptRun:
    """Raises ClientErrors."""
    run = submit(services.client, body, chat.token_ids, chat.params, name, 0)
    if chat.plan is not None and not isinstance(run.stream, BeamStream):  # beams end whole
        chat.plan.show_markers(run.stream)
    return run
