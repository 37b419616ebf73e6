"""generation_config.json: the sampling defaults that a model's authors recommend, under SamplingParams' names.

The core's launch refuses a file that cannot be used (enginecore/loading/model_files.py), frontends fill in what requests
leave out (frontend/text/tokenizer.py): both with this function, so that what was let in means the same to both.
"""

from collections.abc import Mapping
from typing import Any

from quire.ipc.sampling import IN_GENERATION_CONFIG, SamplingParams

# The file's fields that are sampling defaults, and their names in SamplingParams.
_FIELDS = {**{name: name for name in IN_GENERATION_CONFIG}, "max_new_tokens": "max_tokens"}
_OVERRIDABLE = (*_FIELDS, "do_sample", "eos_token_id")


def check_overrides(overrides: Mapping[str, Any]) -> None:
    """Raises ValueError for a field of --override-generation-config that nothing would come of, or a value that cannot be."""
    for name in overrides:
        if name not in _OVERRIDABLE:
            raise ValueError(f"{name!r} has no meaning here; fields are {', '.join(_OVERRIDABLE)}")
    try:
        generation_defaults(overrides)
    except ValueError as error:
        raise ValueError(str(error).removeprefix("generation_config.json: ")) from None


def generation_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of SamplingParams that the file's object sets; do_sample false is temperature 0, whatever else it says.

    Raises ValueError, naming file and field, for a value that SamplingParams refuses.
    """
    found = {ours: config[name] for name, ours in _FIELDS.items() if config.get(name) is not None}
    try:
        SamplingParams(**found)
    except ValueError as error:
        raise ValueError(f"generation_config.json: {error}") from None
    return {**found, "temperature": 0.0} if config.get("do_sample") is False else found
