"""The start of an engine finds the draft model, says why a model runs without speculation, and what was asked for.

Called by daemon.py. A worker decides whether the draft model can be run (workers/speculation/loaded.py).
"""

import hashlib
import json
import logging
from pathlib import Path

import msgspec

from quire.enginecore.hosts.setup import is_spread
from quire.enginecore.loading.hub import ModelFilesError
from quire.enginecore.loading.model_files import (
    BUNDLED_DRAFTS,
    frontend_files,
    model_summary,
    read_json,
    resolve_model,
    resolve_tokenizer,
)
from quire.enginecore.loading.model_names import served_name
from quire.ipc.config import EngineConfig
from quire.ipc.messages.frontend import DraftsTold
from quire.ipc.speculative_config import SpeculativeConfig
from quire.ipc.speculative_options import speculation_of

log = logging.getLogger("quire.enginecore")


def with_verifier(config: EngineConfig, model_dir: Path) -> tuple[EngineConfig, Path]:
    """The configuration and folder of the model to serve.

    If the folder is a drafter of the speculators library, which names the model that it is for (its verifier), that model is
    served, and the folder drafts for it. Raises ModelFilesError.
    """
    said = read_json(model_dir / "config.json")
    if not said.get("speculators_model_type"):
        return config, model_dir
    what = f"{config.model} is a drafter of the speculators library"
    if config.speculative_config is not None:
        raise ModelFilesError(f"{what}: leave --speculative-config out, or give the model that it drafts for as the model")
    named = said.get("speculators_config")
    verifier = named.get("verifier") if isinstance(named, dict) else None
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    if not isinstance(name, str) or not name:
        raise ModelFilesError(f"{what}, and its config.json does not name its verifier: give both, the model and --spec-model")
    try:
        speculation = speculation_of({"model": str(model_dir)})
        folder = resolve_model(name, None, config.download_dir, config.load_format != "dummy", config.hf_token)
    except (ValueError, ModelFilesError) as error:
        raise ModelFilesError(f"{what}, with {name} as its verifier: {error}") from None
    names = config.served_model_name or [served_name(config.model or "")]
    more = {"model": name, "revision": None, "speculative_config": speculation, "served_model_name": names}
    log.info("%s, and %s is served, the model that it drafts for", what, name)
    return msgspec.structs.replace(config, **more), folder


def with_draft_model(config: EngineConfig, model_dir: Path, tokenizer_json: bytes) -> EngineConfig:
    """The configuration with its draft model's folder and context, if it has one, or its head's.

    model_dir, tokenizer_json: the model's.

    Raises ModelFilesError, of which the text begins with the flag, if the draft model is not there or has other tokens.
    """
    asked = config.speculative_config
    if asked is None or asked.method == "ngram":
        return config
    name = asked.model or str(BUNDLED_DRAFTS / asked.method)
    flag = f"--speculative-config: model {name}"
    if is_spread(config):
        raise ModelFilesError(f"--speculative-config: {asked.method} does not work with workers on several hosts yet")
    if asked.method == "mtp":
        if asked.model not in (None, config.model, str(model_dir)):
            raise ModelFilesError(f"{flag}: mtp is a part of the model that is served: leave model out")
        return msgspec.structs.replace(config, speculative_config=msgspec.structs.replace(asked, model=str(model_dir)))
    try:
        place, token = config.download_dir, config.hf_token
        folder = resolve_model(name, asked.revision, place, config.load_format != "dummy", token)
        if asked.method == "eagle3":  # its tokens are the model's, and its worker says what does not fit
            return msgspec.structs.replace(config, speculative_config=msgspec.structs.replace(asked, model=str(folder)))
        resolve_tokenizer(None, folder)
        summary = model_summary(folder, generation_config="vllm")
        own = frontend_files(folder, generation_config="vllm")["tokenizer.json"]
    except ModelFilesError as error:
        raise ModelFilesError(f"{flag}: {error}") from None
    if summary.keeps_states:
        raise ModelFilesError(f"{flag}: it has recurrent layers, and a draft model has attention alone")
    if own != tokenizer_json and tokens_digest(own, folder) != tokens_digest(tokenizer_json, model_dir):
        raise ModelFilesError(f"{flag}: its tokenizer has other tokens than the model's, so its drafts would mean nothing")
    longest = min(asked.max_model_len or summary.max_model_len, summary.max_model_len)
    found = msgspec.structs.replace(asked, model=str(folder), max_model_len=longest)
    return msgspec.structs.replace(config, speculative_config=found)


def tokens_digest(tokenizer_json: bytes, folder: Path) -> bytes:
    """A digest of what a tokenizer.json says of its tokens: which there are, how texts become tokens, and with which ids.
    Tokenizers of equal digests may differ in padding, truncation and what is put around a text. Raises ModelFilesError."""
    try:
        said = json.loads(tokenizer_json)
        added = [[token["id"], token["content"]] for token in said.get("added_tokens") or []]
        parts = [said["model"], sorted(added), said.get("normalizer"), said.get("pre_tokenizer"), said.get("decoder")]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelFilesError(f"tokenizer.json in {folder} cannot be read: {error}") from None
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()


def drafts_told(config: EngineConfig) -> DraftsTold | None:
    """The counts of drafts that answers have; None: none."""
    if config.speculative_config is None or config.per_request_spec_decode_metrics == "none":
        return None
    return DraftsTold(config.per_request_spec_decode_metrics == "detailed", config.speculative_config.num_speculative_tokens)


def say_drafts(config: SpeculativeConfig | None) -> None:
    """Log what is drafted, and what of it is unusual. Says nothing without speculation."""
    if config is None:
        return
    by = f"{config.method} of {config.prompt_lookup_min} to {config.prompt_lookup_max} tokens"
    if config.method == "eagle3":
        by = f"the EAGLE-3 head {config.model}"
    elif config.method == "mtp":
        by = "the model's own layers for further tokens (mtp)"
    elif config.model is not None:
        by = f"the draft model {config.model}, in sequences of up to {config.max_model_len} tokens"
    log.info("speculation: up to %d drafts a sequence and step, by %s", config.num_speculative_tokens, by)
    if config.asked_tokens is not None:
        line = "num_speculative_tokens %d: at most %d tokens are drafted for a sequence and step"
        log.warning(line, config.asked_tokens, config.num_speculative_tokens)
    if config.synthetic_acceptance_rates:
        log.warning(
            "rejection_sample_method synthetic: drafts are accepted by chance, and answers are wrong; for benchmarks only"
        )
