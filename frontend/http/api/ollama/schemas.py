"""Bodies of Ollama's API as msgspec structs (https://github.com/ollama/ollama/blob/main/docs/api.md), requests and answers.

request.py translates a request; answer.py makes the answers. A field that is null means the same as one that is absent.
`NotHere` has the fields that would change the answer and are not supported; request.py refuses them by name. Options without a
field here are ignored.
"""

from typing import Annotated, Any, Literal

import msgspec

from quire.frontend.http.api.bodies.schemas import MAX_ITEMS, Int64, Json, Objects, ShortText
from quire.frontend.http.api.messages.schemas import RawObject

Unset = msgspec.UnsetType


# ------------------------------------------------------------------------------------------------------------- requests
class Options(msgspec.Struct, kw_only=True):
    """num_predict: below 1, the answer may be as long as the context."""

    num_predict: Int64 | None = None
    temperature: float | None = None
    top_k: Int64 | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class CalledFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: Json | None = None


class InputCall(msgspec.Struct, kw_only=True):
    function: CalledFunction
    id: str | None = None


class OllamaMessage(msgspec.Struct, kw_only=True):
    """tool_name, tool_call_id: of the call that a message of the role "tool" answers."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: Annotated[list[InputCall], msgspec.Meta(max_length=MAX_ITEMS)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class NotHere(msgspec.Struct, kw_only=True):
    """Fields that are refused, except values without effect."""

    suffix: Any = None
    template: Any = None
    context: Any = None
    logprobs: Any = None
    top_logprobs: Any = None


class _Request(NotHere, kw_only=True):
    """The fields of both generating routes."""

    model: ShortText | None = None
    stream: bool | None = None
    options: Options | None = None
    format: str | Json | None = None
    think: bool | ShortText | None = None
    keep_alive: Any = None


class OllamaChatRequest(_Request, kw_only=True):
    messages: Annotated[list[OllamaMessage], msgspec.Meta(max_length=MAX_ITEMS)] | None = None
    tools: Objects | None = None


class OllamaGenerateRequest(_Request, kw_only=True):
    prompt: str | None = None
    images: list[str] | None = None
    system: str | None = None
    raw: bool | None = None


class ShowRequest(msgspec.Struct, kw_only=True):
    """name: the older name of model."""

    model: ShortText | None = None
    name: ShortText | None = None
    verbose: bool | None = None


# -------------------------------------------------------------------------------------------------------------- answers
class OutputFunction(msgspec.Struct, frozen=True):
    index: int
    name: str
    arguments: RawObject


class OutputCall(msgspec.Struct, frozen=True):
    id: str
    function: OutputFunction


class OutputMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str = ""
    thinking: str | Unset = msgspec.UNSET
    tool_calls: list[OutputCall] | Unset = msgspec.UNSET


class _Response(msgspec.Struct, frozen=True, kw_only=True):
    """done_reason and what follows are in a whole answer, and in the last line of a stream."""

    model: str
    created_at: str
    done: bool
    done_reason: str | Unset = msgspec.UNSET
    total_duration: int | Unset = msgspec.UNSET
    load_duration: int | Unset = msgspec.UNSET
    prompt_eval_count: int | Unset = msgspec.UNSET
    prompt_eval_duration: int | Unset = msgspec.UNSET
    eval_count: int | Unset = msgspec.UNSET
    eval_duration: int | Unset = msgspec.UNSET


class OllamaChatResponse(_Response, frozen=True, kw_only=True):
    message: OutputMessage


class OllamaGenerateResponse(_Response, frozen=True, kw_only=True):
    response: str
    thinking: str | Unset = msgspec.UNSET
