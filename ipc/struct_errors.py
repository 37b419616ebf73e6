"""Metaclasses of SamplingParams and others that answer options of vLLM's, and unknown ones, with what to write instead.

They act only where Python code makes the object by its name; messages are decoded past it.
"""

from typing import Any, NoReturn

import msgspec

from quire.ipc.unknown_names import NoSuchName, what_to_write

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
    "skip_clone": "params are copied where they must be",
    "flat_logprobs": "logprobs are a list of dicts",
    "logprob_token_ids": "logprobs=N returns the most likely tokens",
    "max_new_tokens": "use max_tokens",
    "max_length": "use max_tokens, which does not count the prompt",
    "max_completion_tokens": "use max_tokens",
    "min_new_tokens": "use min_tokens",
    "do_sample": "temperature=0.0 is greedy, and every other temperature samples",
    "num_return_sequences": "use n",
    "num_beams": "LLM.beam_search(prompts, BeamSearchParams(beam_width=...))",
    "beam_width": "LLM.beam_search(prompts, BeamSearchParams(beam_width=...))",
    "stop_strings": "use stop",
    "eos_token_id": "use stop_token_ids",
    "top_logprobs": "use logprobs",
    "stream": "AsyncLLM.generate and AsyncClient.generate stream",
    "guided_json": "structured_outputs=StructuredOutputsParams(json=...)",
    "guided_regex": "structured_outputs=StructuredOutputsParams(regex=...)",
    "guided_choice": "structured_outputs=StructuredOutputsParams(choice=[...])",
    "guided_grammar": "structured_outputs=StructuredOutputsParams(grammar=...)",
}
_AS_DICT = "msgspec.structs.asdict(params) makes a dict of it"
_METHODS = {  # of other libraries' parameters, or vLLM's own
    "to_dict": _AS_DICT,
    "dict": _AS_DICT,
    "model_dump": _AS_DICT,
    "asdict": _AS_DICT,
    "copy": "clone() makes a copy",
    "update": "its fields can be set",
    "verify": "values are checked where they are set",
    "_verify_args": "values are checked where they are set",
    "_verify_greedy_sampling": "values are checked where they are set",
}


_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {  # values that are taken; for all names None
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "truncate_prompt_tokens": (-1,),
    "skip_clone": (False, True),
    "flat_logprobs": (False,),
    "stream": (False,),
}


def check_elsewhere(kind: str, name: str, value: object, n: int) -> None:
    """Raises ValueError for an option of vLLM's that is written otherwise here, unless its value changes nothing."""
    if value is not None and value not in _WITHOUT_EFFECT.get(name, ()) and (name != "best_of" or value != n):
        raise ValueError(f"{kind} has no {name!r} here: {_ELSEWHERE[name]}")


def is_elsewhere(name: str) -> bool:
    return name in _ELSEWHERE


def other_field(kind: type[msgspec.Struct], name: str) -> Any:
    """The value of a field of vLLM's that has no effect here. Raises NoSuchName for other names."""
    if name in _WITHOUT_EFFECT or name == "best_of":
        return None if name in ("logits_processors", "truncate_prompt_tokens", "best_of") else _WITHOUT_EFFECT[name][0]
    return no_field(kind, name)


def no_field(kind: type[msgspec.Struct], name: str) -> NoReturn:
    """Raises NoSuchName for an attribute that `kind` does not have."""
    hint = what_to_write(name, kind.__struct_fields__, _METHODS | _ELSEWHERE)
    raise NoSuchName(f"{kind.__name__} has no field {name!r}; {hint}")


class StructErrors(type(msgspec.Struct)):  # type: ignore[misc]
    def __call__(cls, *args: Any, **options: Any) -> Any:
        """Raises ValueError where Python would raise a TypeError."""
        if "guided_decoding" in options:  # the older name
            options["structured_outputs"] = options.pop("guided_decoding")
        try:
            return super().__call__(*args, **options)
        except TypeError as error:
            known, kind = cls.__struct_fields__, cls.__name__
            if others := [name for name in options if name in _ELSEWHERE and name not in known]:
                for other in others:
                    check_elsewhere(kind, other, options.pop(other), options.get("n", 1))
                return cls(*args, **options)
            name = next((name for name in options if name not in known), None)
            if name is not None:
                raise ValueError(f"{kind} has no {name!r}; {what_to_write(name, known)}") from error
            if "positional" in str(error):
                raise ValueError(f"{kind} takes its fields by their names: {kind}({known[0]}=..., {known[1]}=...)") from error
            missing = [each for each in known if f"'{each}'" in str(error)]
            if not missing:
                raise
            raise ValueError(f"{kind} needs {', '.join(missing)}: {kind}({', '.join(f'{n}=...' for n in missing)})") from error


class FieldErrors(type):
    """The same for a dataclass: a ValueError for a name that is no field of it."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        try:
            return super().__call__(*args, **options)
        except TypeError as error:
            known = tuple(cls.__dataclass_fields__)  # type: ignore[attr-defined]
            name = next((name for name in options if f"{name!r}" in str(error)), None)
            if name is None or name in known:
                raise
            hints = dict.fromkeys(("backend", "_backend"), "Quire has one backend")
            raise ValueError(f"{cls.__name__} has no {name!r}; {what_to_write(name, known, hints)}") from error
