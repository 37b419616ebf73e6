"""The start of an engine says why a model runs without speculation, and what was asked for. For daemon.py."""

import logging

from quire.ipc.config import EngineConfig
from quire.ipc.messages.frontend import DraftsTold
from quire.ipc.speculative_config import SpeculativeConfig

log = logging.getLogger("quire.enginecore")


def drafts_told(config: EngineConfig) -> DraftsTold | None:
    """The counts of drafts that answers have; None: none."""
    if config.speculative_config is None or config.per_request_spec_decode_metrics == "none":
        return None
    return DraftsTold(config.per_request_spec_decode_metrics == "detailed", config.speculative_config.num_speculative_tokens)


def say_drafts(config: SpeculativeConfig | None) -> None:
    """Log what is drafted, and what of it is unusual. Says nothing without speculation."""
    if config is None:
        return
    most, shortest, longest = config.num_speculative_tokens, config.prompt_lookup_min, config.prompt_lookup_max
    log.info(
        "speculation: up to %d drafts a sequence and step, by %s of %d to %d tokens", most, config.method, shortest, longest
    )
    if config.asked_tokens is not None:
        log.warning(
            "num_speculative_tokens %d: at most %d tokens are drafted for a sequence and step", config.asked_tokens, most
        )
    if config.synthetic_acceptance_rates:
        log.warning(
            "rejection_sample_method synthetic: drafts are accepted by chance, and answers are wrong; for benchmarks only"
        )
