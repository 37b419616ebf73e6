"""Bodies of requests and responses, as msgspec structs with OpenAI's and vLLM's field names.

body.py decodes them. A field that is null means the same as one that is absent. `Unsupported` has the fields that would change
the answer and are not supported; `check_supported` refuses them by name. SamplingParams checks the bounds of values.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Annotated, Any

import msgspec

from quire.frontend.http.api.bodies.draft_metrics import AnswerMetrics
from quire.frontend.http.api.bodies.fields import MoreFields
from quire.frontend.http.api.bodies.structured import ResponseFormat, StructuredOutputsFields
from quire.frontend.http.protocol.errors import ApiError
from quire.ipc.sampling import SamplingParams

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
ShortText = Annotated[str, msgspec.Meta(max_length=256)]
CacheSalt = Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]  # an empty one would silently separate nothing
Json = dict[str, Any]
# A chat template takes some 10 us an item and blocks the event loop meanwhile, so counts are bounded before it runs.
MAX_ITEMS = 1 << 14  # messages of a chat; content parts and tool calls of all of them
Messages = Annotated[list[Json], msgspec.Meta(min_length=1, max_length=MAX_ITEMS)]
Objects = Annotated[list[Json], msgspec.Meta(max_length=1024)]
TemplateVariables = Annotated[Json, msgspec.Meta(max_length=64)]

MAX_PROMPTS = 1024  # prompts of one request
MAX_SEQUENCES = 2048  # prompts times n


# ------------------------------------------------------------------------------------------------------------- requests
class Unsupported(MoreFields, kw_only=True):
    """Fields that would change the answer and are not supported; _HARMLESS has the values without effect."""

    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: Any = None
    prediction: Any = None
    web_search_options: Any = None
    suffix: Any = None
    prompt_embeds: Any = None
    kv_transfer_params: Any = None
    logits_processors: Any = None
    media_io_kwargs: Any = None


class StreamOptions(msgspec.Struct):
    """continuous_usage_stats has no effect without include_usage; include_obfuscation (padding) is refused."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None

    @property
    def usage_in_every_event(self) -> bool:
        return bool(self.include_usage and self.continuous_usage_stats)


# Fields of SamplingParams that the frontend fills in, and others that bodies lack or have in another shape or by another name.
FILLED_IN = ("bad_words_token_ids", "reasoning_end_token_ids", "reasoning_start_token_ids", "output_kind")
_OTHERWISE = ("logprobs", "structured_outputs", "thinking_token_budget", "extra_args", "detokenize", *FILLED_IN)
_WIRE_TYPES: dict[Any, Any] = {  # a field's type in SamplingParams -> its type in a body, with bounds
    int: Int64,
    int | None: Int64,
    list[str] | str | None: str | list[str],
    list[int] | None: list[TokenId],
    dict[int, float] | None: dict[TokenId, float],
}
_SamplingValues = msgspec.defstruct(
    "_SamplingValues",
    [
        (field.name, _WIRE_TYPES.get(field.type, field.type) | None, None)
        for field in msgspec.structs.fields(SamplingParams)
        if field.name not in _OTHERWISE
    ],
    bases=(Unsupported,),
    kw_only=True,
)
# Names that a body and SamplingParams share, without max_tokens, which depends on the prompt's length.
SAMPLING_VALUES = tuple(name for name in _SamplingValues.__annotations__ if name != "max_tokens")


class SamplingFields(_SamplingValues, kw_only=True):  # type: ignore[call-arg, misc, valid-type]
    """The fields of both generating routes: SamplingParams' (null means the default) and those below."""

    model: ShortText | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    best_of: Int64 | None = None
    truncate_prompt_tokens: Int64 | None = None
    add_special_tokens: bool | None = None
    priority: Int32 | None = None
    timeout: float | None = None
    cache_salt: CacheSalt | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsFields | None = None
    guided_json: str | Json | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    vllm_xargs: Json | None = None


class ChatRequest(SamplingFields, kw_only=True):  # type: ignore[call-arg]
    """A chat. The chat template checks the messages themselves."""

    messages: Messages
    tools: Objects | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    documents: Objects | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    reasoning_effort: ShortText | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Int64 | None = None
    max_completion_tokens: Int64 | None = None
    logprobs: bool | None = None
    top_logprobs: Int64 | None = None
    echo: bool | None = None
    chat_template: str | None = None
    mm_processor_kwargs: Json | None = None
    return_prompt_text: bool | None = None


class CompletionRequest(SamplingFields, kw_only=True):  # type: ignore[call-arg]
    prompt: str | list[str | TokenId | list[TokenId]] | None  # vLLM's clients send null beside prompt_embeds
    logprobs: Int64 | bool | None = None  # true means 1, as for pydantic
    echo: bool | None = None
    thinking_token_budget: Any = None  # refused: only chat templates tell where reasoning ends


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """A body with either `prompt` or `messages`."""

    prompt: str | None = None
    messages: Messages | None = None
    model: ShortText | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: Objects | None = None
    documents: Objects | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    reasoning_effort: ShortText | None = None
    chat_template: str | None = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Json | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: Annotated[list[TokenId], msgspec.Meta(max_length=1 << 20)]
    model: ShortText | None = None


def _empty(value: Any) -> bool:
    return value is False or value == "" or value == [] or value == {}


_HARMLESS: dict[str, Callable[[Any], bool]] = {
    "function_call": lambda v: v in ("none", "auto"),
    "modalities": lambda v: v == ["text"],
}


# Reasons, and what works instead.
_TEXT_ONLY = "answers are text only."
_HOW = {
    "functions": "send them as tools.",
    "function_call": "see tools and tool_choice.",
    "audio": _TEXT_ONLY,
    "modalities": f'{_TEXT_ONLY[:-1]}; ["text"] is taken.',
    "prediction": "nothing is made faster by it here; leave it out.",
    "web_search_options": "it searches nothing; describe a function that does in tools.",
    "suffix": "models go on from the end of a prompt, and fill no gaps; put all of the text into prompt.",
    "prompt_embeds": "prompts are texts or token ids.",
    "kv_transfer_params": "KV blocks stay in their engine.",
    "logits_processors": "classes are named when the server starts, with --logits-processors module:Class; a request gives "
    "their arguments in vllm_xargs.",
    "media_io_kwargs": "an image is decoded in one way.",
}


_unsupported = attrgetter(*Unsupported.__annotations__)
_NOTHING = (None,) * len(Unsupported.__annotations__)


def check_supported(body: Unsupported) -> None:
    """Raises ApiError 400, naming the first field that is not supported."""
    values = _unsupported(body)
    if values == _NOTHING:
        return
    for name, value in zip(Unsupported.__annotations__, values, strict=True):
        if value is not None and not _HARMLESS.get(name, _empty)(value):
            why = f"{name}: this value is not supported by this server: {_HOW[name]}"
            raise ApiError(400, why, param=name, code="unsupported_value")


# ------------------------------------------------------------------------------------------------------------ responses
class PromptTokensDetails(msgspec.Struct, frozen=True):
    """multimodal_tokens: by kind, those that media have become."""

    cached_tokens: int
    multimodal_tokens: dict[str, int] | msgspec.UnsetType = msgspec.UNSET


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatLogprob]


class CompletionLogprobs(msgspec.Struct):
    text_offset: list[int] = []
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] = []


class PromptLogprob(msgspec.Struct, frozen=True):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobList = list[dict[int, PromptLogprob] | None]


class FunctionCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    id: str
    function: FunctionCall


class CustomCall(msgspec.Struct, frozen=True):
    name: str
    input: str


class CustomToolCall(msgspec.Struct, frozen=True, tag_field="type", tag="custom"):
    id: str
    custom: CustomCall


class ChatMessage(msgspec.Struct, frozen=True):
    """reasoning_content: the older name of reasoning."""

    role: str
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall | CustomToolCall] = []
    reasoning: str | msgspec.UnsetType | None = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType | None = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatResponse(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobList | None = None
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_text: str | msgspec.UnsetType = msgspec.UNSET
    metrics: AnswerMetrics | msgspec.UnsetType | None = msgspec.UNSET


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobList | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionResponse(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    metrics: AnswerMetrics | msgspec.UnsetType | None = msgspec.UNSET


class ModelPermission(msgspec.Struct, frozen=True, kw_only=True):
    """Constant values; clients look for the object."""

    id: str
    object: str = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "quire"
    root: str
    parent: str | None = None
    max_model_len: int
    input_modalities: list[str]
    permission: list[ModelPermission] = []


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[ModelCard]


class TokenizeResponse(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(msgspec.Struct, frozen=True):
    prompt: str


class VersionResponse(msgspec.Struct, frozen=True):
    version: str


class ServerLoad(msgspec.Struct, frozen=True):
    server_load: int


class PrefixCacheReset(msgspec.Struct, frozen=True):
    success: bool  # False: blocks of running requests will be cached again


class ProfileAnswer(msgspec.Struct, frozen=True):
    traces: list[str]  # files in the folder of --profile-dir


class ServerInfoAnswer(msgspec.Struct, frozen=True):
    vllm_config: Json | str
    vllm_env: dict[str, str]
    system_env: dict[str, str]
