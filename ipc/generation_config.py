"""generation_config.json: the sampling defaults that a model's authors recommend, under SamplingParams' names.

The core refuses a file that cannot be used when it starts (enginecore/loading/model_files.py); frontends fill in the values
that requests leave out (frontend/text/tokenizer.py). Both call `generation_defaults`, so a file means the same to both.
"""

from collections.abc import Mapping
from typing import Any

from quire.ipc.sampling import RECOMMENDED, SamplingParams

# The file's fields that are sampling defaults, and their names in SamplingParams; the list is vLLM's.
_FIELDS = {**{name: name for name in RECOMMENDED}, "max_new_tokens": "max_tokens"}
_OVERRIDABLE = (*_FIELDS, "do_sample", "eos_token_id")


def check_overrides(overrides: Mapping[str, Any]) -> None:
    """Raises ValueError for a field of --override-generation-config that has no effect, or a value that is not allowed."""
    for name in overrides:
        if name not in _OVERRIDABLE:
            raise ValueError(f"{name!r} has no meaning here; fields are {', '.join(_OVERRIDABLE)}")
    try:
        generation_defaults(overrides)
    except ValueError as error:
        raise ValueError(str(error).removeprefix("generation_config.json: ")) from None


def generation_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of SamplingParams that the file sets. do_sample false means temperature 0, whatever the file's temperature.

    Raises ValueError, naming file and field, for a value that SamplingParams refuses.
    """
    found = {ours: config[name] for name, ours in _FIELDS.items() if config.get(name) is not None}
    try:
        SamplingParams(**found)
    except ValueError as error:
        raise ValueError(f"generation_config.json: {error}") from None
    return {**found, "temperature": 0.0} if config.get("do_sample") is False else found
