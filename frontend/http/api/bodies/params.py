"""`make_params`: the one place where routes make SamplingParams, when the prompt's length and the output's plan are known.

The checks that need the prompt's length are here, so their error texts can name the numbers.
"""

from typing import Any

from quire.frontend.http.api.bodies.checked import CheckedRequest
from quire.frontend.http.api.errors import invalid, too_long
from quire.frontend.http.api.output_plan import Plan
from quire.ipc.limits import longest_prompt, output_limit, output_room
from quire.ipc.sampling import BOUNDS, SamplingParams


def make_params(
    checked: CheckedRequest, num_prompt_tokens: int, max_model_len: int, plan: Plan | None = None
) -> SamplingParams:
    """SamplingParams for a prompt of this length. Raises ApiError 400 for a value out of bounds, or beyond the context."""
    room = output_room(num_prompt_tokens, max_model_len, checked.max_tokens if checked.is_for_prompt else None)
    if room < 1 and checked.no_room:
        longest = longest_prompt(max_model_len)
        text = checked.no_room.format(num_prompt_tokens=num_prompt_tokens, max_model_len=max_model_len, longest_prompt=longest)
        raise too_long(text, checked.prompt_field)
    fields = {**checked.sampling, "max_tokens": checked.max_tokens}
    if checked.max_tokens is not None and checked.max_tokens > room:
        if not checked.cuts_max_tokens:
            raise too_long(
                f"This model's maximum context length is {max_model_len} tokens, but {num_prompt_tokens + checked.max_tokens} "
                f"were requested ({num_prompt_tokens} in the prompt, {checked.max_tokens} for the completion). "
                "Please shorten the prompt or ask for fewer tokens.",
                checked.prompt_field,
            )
        _cut(fields, room)
    if checked.max_tokens is None and checked.default_max_tokens is not None:
        fields["max_tokens"] = output_limit(checked.default_max_tokens, room)
    if not checked.cuts_max_tokens and fields.get("min_tokens", 0) > room:
        raise invalid(f"min_tokens must be at most {room}, what the context has left after the prompt", "min_tokens")
    if plan is not None:
        fields |= plan.sampling_fields(fields.get("structured_outputs"))
    try:
        return SamplingParams(**fields)
    except ValueError as error:
        raise invalid(str(error).replace("extra_args", checked.extra_args)) from None


def _cut(fields: dict[str, Any], room: int) -> None:
    """Cut max_tokens and min_tokens to the room, unless they are invalid by themselves."""
    most, least = BOUNDS["min_tokens"][1], fields.get("min_tokens", 0)
    if room >= 1 and 0 <= least <= min(fields["max_tokens"], most) and fields["max_tokens"] < 2**63:  # type: ignore[type-var]
        fields |= {"max_tokens": room, "min_tokens": min(least, room)}
