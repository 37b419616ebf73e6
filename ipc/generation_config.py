"""generation_config.json: the sampling defaults that a model's authors recommend, under SamplingParams' names.

The core refuses a file that cannot be used when it starts (enginecore/loading/model_files.py); frontends fill in the values
that requests leave out (frontend/text/tokenizer.py). Both call `generation_defaults`, so a file means the same to both.
"""

from collections.abc import Mapping
from typing import Any

from quire.ipc.sampling import RECOMMENDED, SamplingParams

# The file's fields that are sampling defaults, and their names in SamplingParams; the list is vLLM's.
_FIELDS = {**{name: name for name in RECOMMENDED}, "max_new_tokens": "max_tokens"}
# Fields that say nothing about sampling: read elsewhere, or bookkeeping of transformers.
_ELSEWHERE = frozenset(
    [
        "do_sample",
        "eos_token_id",
        "bos_token_id",
        "pad_token_id",
        "decoder_start_token_id",
        "transformers_version",
        "use_cache",
        "_from_model_config",
        "cache_implementation",
        "trust_remote_code",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "output_logits",
        "return_dict_in_generate",
    ]
)
# Values with which a field changes nothing.
_NEUTRAL = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "no_repeat_ngram_size": 0,
    "length_penalty": 1.0,
    "early_stopping": False,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "diversity_penalty": 0.0,
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "guidance_scale": 1.0,
    "top_h": 1.0,
    "remove_invalid_values": False,
    "renormalize_logits": False,
    "min_length": 0,
    "penalty_alpha": 0.0,
}
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


def passed_over(config: Mapping[str, Any]) -> list[str]:
    """The file's fields that would change what transformers generates, and have no meaning here; by their names."""
    known = {*_FIELDS, *_ELSEWHERE}
    return sorted(
        name
        for name, value in config.items()
        if name not in known and value not in (None, [], {}) and not (name in _NEUTRAL and value == _NEUTRAL[name])
    )


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
