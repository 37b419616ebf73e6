"""Fields and bounds that bodies of the routes for vectors and scores share, and the prompts that their inputs are."""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from quire.frontend.client.pooling import Ids, as_arrays, marked, tokenized
from quire.frontend.client.turns import MANY, if_many, in_thread
from quire.frontend.http.api.bodies.schemas import CacheSalt, Int32, Int64, ShortText, TokenId
from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.services import Services
from quire.frontend.http.protocol.errors import ApiError
from quire.ipc.pooling import PoolingInfo, PoolingTask

MAX_INPUTS = 2048  # of one body
MAX_DOCUMENTS = 1 << 16  # of one query

Input = str | list[str | TokenId | list[TokenId]]
Prompt = str | list[int]


class PoolingUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: None = None


class RequestFields(msgspec.Struct, kw_only=True):
    """Fields of every such body that say how it runs."""

    model: ShortText | None = None
    request_id: ShortText | None = None
    priority: Int32 | None = None
    cache_salt: CacheSalt | None = None
    timeout: float | None = None


class PromptFields(RequestFields, kw_only=True):
    """Those that say how its texts become prompts."""

    truncate_prompt_tokens: Int64 | None = None
    truncation_side: ShortText | None = None
    add_special_tokens: bool | None = None


class PoolFields(PromptFields, kw_only=True):
    """Those that say how a prompt is pooled. normalize and activation: older names of use_activation."""

    dimensions: Int64 | None = None
    use_activation: bool | None = None
    normalize: bool | None = None
    activation: bool | None = None

    @property
    def uses_activation(self) -> bool | None:
        given = self.use_activation, self.normalize, self.activation
        return next((value for value in given if value is not None), None)


Texts = Annotated[list[str], msgspec.Meta(min_length=1)]

_VERBS: dict[str, str] = {
    "embed": "make vectors",
    "token_embed": "make vectors of tokens",
    "classify": "classify",
    "token_classify": "classify tokens",
    "embed_sparse": "make sparse vectors",
    "generate": "generate text (/v1/chat/completions)",
}


def need(services: Services, *tasks: PoolingTask) -> PoolingInfo:
    """How the model pools, if it has one of these tasks. Raises ApiError 400, which says what it has."""
    limits = services.limits
    if limits.pooling is not None and any(task in limits.pooling.tasks for task in tasks):
        return limits.pooling
    wanted = " or ".join(_VERBS[task] for task in tasks)
    raise _cannot(services, wanted, "--runner pooling and --convert change that at the start")


def need_generation(services: Services) -> None:
    """Raises ApiError 400 for a model that does not write text."""
    if not services.limits.generates:
        raise _cannot(services, "generate text", "/v1/embeddings, /score and /pooling are its routes")


def _cannot(services: Services, wanted: str, instead: str) -> ApiError:
    can = " and ".join(_VERBS[task] for task in services.limits.tasks)
    text = f"The model that is served cannot {wanted}; it can {can}: {instead}."
    return ApiError(400, text, param="model", code="unsupported_task")


def refuse(body: msgspec.Struct, **reasons: str) -> None:
    """Raise ApiError 400 for a field that is given and not served. reasons: by field."""
    for name, why in reasons.items():
        if getattr(body, name, None):
            raise ApiError(400, f"{name}: {why}.", param=name, code="unsupported_value")


def refuse_raw(body: PoolFields) -> None:
    """Raise ApiError 400 for a body with weights_for_different_modes and a field that wants raw vectors or scores."""
    if getattr(body, "weights_for_different_modes", None) is not None:
        for name in ("use_activation", "normalize", "activation", "raw_scores"):
            if getattr(body, name, None) is (name == "raw_scores"):
                raise invalid(f"{name}: weights_for_different_modes compares normalized vectors, without an activation", name)


def prompts_of(value: Any, field: str = "input", most: int = MAX_INPUTS) -> list[Prompt]:
    """The prompts of an input: a text, texts, ids, or lists of ids. Raises ApiError 400."""
    if isinstance(value, str) or (value and isinstance(value[0], int)):
        value = [value]
    if not 1 <= len(value) <= most:
        raise invalid(f"{field} must hold 1 to {most} inputs, got {len(value)}", field)
    kind = type(value[0])
    for each in value:
        if type(each) is not kind or kind is int:
            raise invalid(f"{field} must be a text, a list of texts, a list of token ids, or a list of such lists", field)
        if not len(each):
            raise invalid(f"{field} must not hold an empty text", field)
    return list(value)


def kept(body: PromptFields) -> int | None:
    """truncate_prompt_tokens as it is given to `tokenized`. Raises ApiError 400."""
    keep = body.truncate_prompt_tokens
    if keep is not None and keep < 1 and keep != -1:
        raise invalid(f"truncate_prompt_tokens must be at least 1, or -1 for what fits, got {keep}", "truncate_prompt_tokens")
    if body.truncation_side not in (None, "left", "right"):
        raise invalid(f"truncation_side must be left or right, got {body.truncation_side}", "truncation_side")
    return keep


def named_prompt(info: PoolingInfo, name: str | None) -> str:
    """The text to put before each input: the prompt of this name, or the model's default. Raises ApiError 400."""
    name = info.default_prompt_name if name is None else name
    if name is None:
        return ""
    if name not in info.prompts:
        known = ", ".join(info.prompts) or "none"
        raise invalid(f"prompt_name: the model has no prompt {name!r:.80}; it has {known}", "prompt_name")
    return info.prompts[name]


def prompt_for_tokens(info: PoolingInfo, name: str | None) -> tuple[str, bool]:
    """(the text to put before each input, whether inputs are queries) of results of tokens: a model of token vectors reads
    texts as queries or as documents, by the prompts of these names. Raises ApiError 400."""
    if info.late is None or name in info.prompts:
        return named_prompt(info, name), name == "query"
    if name not in (None, "query", "document"):
        raise invalid(f"prompt_name must be query or document for this model, got {name!r:.80}", "prompt_name")
    return "", name == "query"


async def ids_of(
    services: Services, prompts: Sequence[Prompt], body: PromptFields, before: str = "", is_query: bool = False
) -> list[Ids]:
    """The ids of prompts of one kind. before: is put before texts. is_query: as for `tokenized`.

    Raises ApiError 400, TooLong."""
    keep, side, special = kept(body), body.truncation_side, body.add_special_tokens is not False
    if isinstance(prompts[0], str):
        texts = [before + text for text in prompts]  # type: ignore[operator]
        how: dict[str, Any] = {"add_special_tokens": special, "keep": keep, "side": side, "is_query": is_query}
        rows = await tokenized(services.client, texts, **how)
        info, tokenizer = services.limits.pooling, services.client.tokenizer
        if info is None or not info.skips_prompts:
            return rows
        of_cut = texts if side == "left" and keep is not None else ()
        return await if_many(sum(map(len, rows)), marked, tokenizer, rows, before, special, of_cut)
    most = services.limits.max_model_len if keep == -1 else keep
    rows = list(prompts)  # type: ignore[arg-type]
    if most is not None:
        rows = [row[-most:] if side == "left" else row[:most] for row in rows]
    return await in_thread(as_arrays, rows) if sum(map(len, rows)) > MANY else rows
