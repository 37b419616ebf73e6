"""A metaclass of SamplingParams that answers options of vLLM's, and unknown ones, with what to write instead.

It acts only where Python code makes the object by its name; messages are decoded past it.
"""

import difflib
from typing import Any

import msgspec

_ELSEWHERE = {
    "logits_processors": "the engine is another process: name classes at its start, LLM(logits_processors=[...]), and give "
    "their values as extra_args",
    "best_of": "n completions are returned, and all of them are wanted: use n",
    "use_beam_search": "LLM.beam_search(prompts, BeamSearchParams(...))",
    "length_penalty": "BeamSearchParams(length_penalty=...), for LLM.beam_search",
    "early_stopping": "LLM.beam_search stops when no better beam is left",
    "truncate_prompt_tokens": "cut the token ids of the prompt; over HTTP it is a field of the body",
    "response_format": "structured_outputs=StructuredOutputsParams(json=...)",
    "repetition_detection": "stop, or frequency_penalty",
}


class StructErrors(type(msgspec.Struct)):  # type: ignore[misc]
    def __call__(cls, *args: Any, **options: Any) -> Any:
        if "guided_decoding" in options:  # the older name
            options["structured_outputs"] = options.pop("guided_decoding")
        try:
            return super().__call__(*args, **options)
        except TypeError as error:
            known = cls.__struct_fields__
            name = next((name for name in options if name not in known), None)
            if name is None:
                raise
            if name in _ELSEWHERE:
                hint = f" here: {_ELSEWHERE[name]}"
            else:
                close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
                hint = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(known)}"
            raise TypeError(f"{cls.__name__} has no {name!r}{hint}") from error
