"""The model's files at launch: finds or downloads them, reads what the core must know, and collects what frontends are sent.

`resolve_model` and `resolve_tokenizer` return folders, `model_summary` reads limits and end-of-sequence ids from the JSON files
and checks the sampling defaults, `frontend_files` returns the files of the handshake, a fixed list. No torch and no
transformers: a tokenizer in another format than tokenizer.json is converted by a short-lived child (convert_tokenizer.py). The
worker decides whether a model can be run at all (workers/models/config.py); only what the core uses is read here. Called once,
at the core's launch.
"""

import functools
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from quire.enginecore.loading.hub import ModelFilesError, download, is_hub_id
from quire.enginecore.loading.model_names import no_vocabulary, what_file_is, what_folder_is
from quire.enginecore.loading.pooling_files import has_torch_weights, max_seq_length, more_patterns
from quire.enginecore.loading.settings import plain
from quire.enginecore.loading.tokenizer_files import ADDITIONAL_TEMPLATES, TokenizerFiles, TokenizerFilesError
from quire.ipc.bundled import CHAT_MODEL, bundled
from quire.ipc.encoders import is_encoder, longest_text
from quire.ipc.generation_config import check_overrides, generation_defaults, passed_over
from quire.ipc.hub_names import hub_id_of
from quire.ipc.text_config import checked_context, checked_vocabulary, keeps_states, stretched_context, text_fields
from quire.ipc.weights_file import weights_file
from quire.ipc.whole_images import whole_image

log = logging.getLogger("quire.enginecore")

BUNDLED = CHAT_MODEL.folder
BUNDLED_DRAFTS = Path(__file__).parent / "bundled_drafts"  # the bundled model's drafters, in folders named by their methods

SMALL_FILES = ["*.json", "tokenizer.model", "tiktoken.model", "*.tiktoken", "merges.txt", "vocab.txt", "chat_template.jinja"]
WEIGHT_FILES = ["*.safetensors"]
OF_SUBFOLDERS = [f"{ADDITIONAL_TEMPLATES}/*.jinja", "*_Pooling/config.json"]
# Not downloaded from a hub repository: subfolders (other formats of the same weights), and a second copy of the weights.
IGNORED_FILES = ["*/*", "consolidated*"]
CONTENT_FORMAT = "chat_template_content_format"  # a field of the tokenizer_config.json that frontends are sent
CONVERTIBLE = (
    "tokenizer.model",
    "tiktoken.model",
    "tekken.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)  # tokenizers that can be converted
TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
CONVERTER_VERSION = b"1"  # a part of the cached result's key
CONVERSION_TIMEOUT_S = 600
MAX_EOS_IDS = 16

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class ModelSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a model that the core needs."""

    max_model_len: int  # the model's own limit, rope scaling included
    eos_token_ids: list[int]  # ascending
    vocab_size: int
    keeps_states: bool = False  # it has recurrent layers
    is_encoder: bool = False  # its prompts are computed whole
    whole_image: int = 0  # most tokens of an image that one step computes whole; 0: images may be cut


# ------------------------------------------------------------------------------------------------------- folders
def resolve_model(
    model: str | None,
    revision: str | None = None,
    download_dir: str | None = None,
    weights: bool = True,
    token: str | None = None,
    runner: str = "auto",
) -> Path:
    """Folder of a model: a bundled one (None), a local folder, or a hub id, which is downloaded unless it is cached.

    weights: False (`--load-format dummy`) if only the small files are needed. runner: the flag, by which the bundled one is
    chosen. Raises ModelFilesError.
    """
    if model is None:
        return bundled(runner).folder
    folder = _local_or_hub(model, revision, download_dir, SMALL_FILES + (WEIGHT_FILES if weights else []), token)
    if not Path(model).expanduser().is_dir():
        has_safetensors = not weights or any(folder.glob("*.safetensors"))
        if more := more_patterns(folder, has_safetensors):
            _download(hub_id_of(model), revision, download_dir, more, token, ignored=[])
    if not (folder / "config.json").is_file():
        raise ModelFilesError(
            what_folder_is(model, folder) or f"{model} has no config.json: it is not a model in Hugging Face's format"
        )
    has_weights = (folder / "model.safetensors.index.json").is_file() or weights_file(folder) is not None
    if weights and not has_weights and not has_torch_weights(folder):
        raise ModelFilesError(
            what_folder_is(model, folder)
            or f"{model} has no model.safetensors and no model.safetensors.index.json. Quire reads safetensors only: pickled "
            "weights (.bin, .pt) can run code when they are read"
        )
    return folder


def resolve_tokenizer(
    tokenizer: str | None,
    model_dir: Path,
    download_dir: str | None = None,
    revision: str | None = None,
    token: str | None = None,
) -> Path:
    """Folder of the tokenizer: the model's, unless another folder or hub id is given. Raises ModelFilesError."""
    folder = model_dir if tokenizer is None else _local_or_hub(tokenizer, revision, download_dir, SMALL_FILES, token)
    if not any((folder / name).is_file() for name in ("tokenizer.json", *CONVERTIBLE)):
        raise ModelFilesError(f"{tokenizer or model_dir} has no tokenizer.json, nor another tokenizer that can be converted")
    return folder


def _local_or_hub(
    name: str, revision: str | None, download_dir: str | None, patterns: list[str], token: str | None
) -> Path:  # fmt: skip
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise ModelFilesError(what_file_is(path))
    try:
        name = hub_id_of(name)
    except ValueError as error:
        raise ModelFilesError(str(error)) from None
    if not is_hub_id(name):
        raise ModelFilesError(f"{name} is neither a folder nor a hub id (like owner/name)")
    return _download(name, revision, download_dir, patterns, token, IGNORED_FILES)


def _download(
    hub_id: str, revision: str | None, download_dir: str | None, patterns: list[str], token: str | None, ignored: list[str]
) -> Path:
    folder = download(hub_id, revision, download_dir, patterns, token, ignored)
    # in folders of their own, which the patterns above cannot tell from others
    download(hub_id, revision, download_dir, OF_SUBFOLDERS, token)
    return folder


# ------------------------------------------------------------------------------------------------------- facts for the core
def model_summary(
    model_dir: Path,
    tokenizer_dir: Path | None = None,
    generation_config: str = "auto",
    hf_overrides: Mapping[str, Any] = _NOTHING,
    generation_overrides: Mapping[str, Any] = _NOTHING,
) -> ModelSummary:
    """The facts about the model that the core needs. generation_config: "auto", "vllm" (no defaults) or a folder.

    hf_overrides and generation_overrides replace fields of config.json and of generation_config.json.
    Raises ModelFilesError, which names the file and field.
    """
    config = text_fields(fields := {**read_json(model_dir / "config.json", required=True), **hf_overrides})
    generation = {**read_json(model_dir / "generation_config.json"), **generation_overrides}
    _check_generation_defaults(_generation_config_file(model_dir, generation_config), generation_overrides)
    if nothing := no_vocabulary(config):
        raise ModelFilesError(nothing)
    try:
        vocab_size = checked_vocabulary(_positive(config, "vocab_size"))
        max_model_len = checked_context(stretched_context(config, _positive(config, "max_position_embeddings")))
        if is_encoder(config):
            max_model_len = longest_text(config, max_model_len)
        max_model_len = min(max_model_len, max_seq_length(model_dir) or max_model_len)
    except ValueError as error:
        raise ModelFilesError(str(error)) from None
    return ModelSummary(
        max_model_len=max_model_len,
        eos_token_ids=_eos_token_ids(config, generation, tokenizer_dir or model_dir, vocab_size),
        vocab_size=vocab_size,
        keeps_states=keeps_states(config),
        is_encoder=is_encoder(config),
        whole_image=whole_image(fields, model_dir),
    )


def read_json(path: Path, required: bool = False) -> dict[str, Any]:
    """The object in a JSON file; {} if the file does not exist and is not required. Raises ModelFilesError."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        if required:
            raise ModelFilesError(f"{path} does not exist") from None
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFilesError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path} is not a JSON object")
    return value


def _positive(config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    if type(value) is not int or value < 1:
        raise ModelFilesError(f"config.json: {name} must be a positive integer, not {value!r}")
    return value


def _eos_token_ids(config: dict[str, Any], generation: dict[str, Any], tokenizer_dir: Path, vocab_size: int) -> list[int]:
    """All ids that end a text: generation_config.json's, config.json's, and that of the tokenizer's eos_token."""
    ids: set[int] = set()
    for source in (generation, config):
        value = source.get("eos_token_id")
        ids.update(x for x in (value if isinstance(value, list) else [value]) if type(x) is int)
    eos = tokenizer_eos_id(tokenizer_dir)
    if eos is not None:
        ids.add(eos)
    kept = sorted(x for x in ids if 0 <= x < vocab_size)
    if len(kept) > MAX_EOS_IDS:
        raise ModelFilesError(f"the model has {len(kept)} end-of-sequence ids; at most {MAX_EOS_IDS} are supported")
    return kept


def tokenizer_eos_id(tokenizer_dir: Path) -> int | None:
    """The id of the tokenizer's eos_token, if its files have one. Raises ModelFilesError."""
    return _tokenizer_files(tokenizer_dir).eos_token_id


def _tokenizer_files(tokenizer_dir: Path) -> TokenizerFiles:
    try:
        has_own = (tokenizer_dir / "tokenizer.json").is_file()
        return TokenizerFiles.read(tokenizer_dir, None if has_own else converted_tokenizer(tokenizer_dir))
    except TokenizerFilesError as error:
        raise ModelFilesError(str(error)) from None


def _generation_config_file(model_dir: Path, generation_config: str) -> Path | None:
    """The generation_config.json with the sampling defaults, if there is one."""
    if generation_config == "vllm":
        return None
    if generation_config == "auto":
        path = model_dir / "generation_config.json"
        return path if path.is_file() else None
    path = Path(generation_config).expanduser() / "generation_config.json"
    if not path.is_file():
        raise ModelFilesError(f"--generation-config: {path} does not exist")
    return path


def _check_generation_defaults(path: Path | None, overrides: Mapping[str, Any]) -> None:
    """Check the file from which frontends fill in what a request leaves out, before a frontend is admitted."""
    try:
        check_overrides(overrides)
    except ValueError as error:
        raise ModelFilesError(f"--override-generation-config: {error}") from None
    if path is None:
        return
    fields = read_json(path)
    if names := passed_over(fields):
        log.warning("%s: passed over are %s; requests may have fields for them", path, ", ".join(names))
    try:
        generation_defaults({**fields, **overrides})
    except ModelFilesError:
        raise
    except ValueError as error:
        raise ModelFilesError(f"{path.parent}/{error}. `--generation-config vllm` ignores the file") from None


# ------------------------------------------------------------------------------------------------------- files for frontends
def frontend_files(
    model_dir: Path,
    tokenizer_dir: Path | None = None,
    chat_template: str | None = None,
    generation_config: str = "auto",
    generation_overrides: Mapping[str, Any] = _NOTHING,
    content_format: str = "auto",
) -> dict[str, bytes]:
    """The files of the handshake, by name. tokenizer.json is always there (converted if need be), others if they exist.

    chat_template: a file or the template itself; it replaces the model's. Raises ModelFilesError.
    """
    tokenizer_dir = tokenizer_dir or model_dir
    tokenizer = _tokenizer_files(tokenizer_dir)
    settings, template = dict(tokenizer.config), tokenizer_dir / "chat_template.jinja"
    files = {"tokenizer.json": tokenizer.tokenizer_json}
    if chat_template is not None:
        settings.pop("chat_template", None)  # and with it the ones for tools
        files["chat_template.jinja"] = _chat_template(chat_template)
    elif template.is_file():
        files["chat_template.jinja"] = template.read_bytes()
    if content_format != "auto":
        settings[CONTENT_FORMAT] = content_format
    files["tokenizer_config.json"] = json.dumps(settings).encode()
    generation = _generation_config_file(model_dir, generation_config)
    if generation is not None or generation_overrides:
        fields = {} if generation is None else read_json(generation)
        files["generation_config.json"] = plain({**fields, **generation_overrides})
    return files


def _chat_template(given: str) -> bytes:
    try:
        return Path(given).expanduser().read_bytes()
    except (OSError, ValueError) as error:  # a name that is too long, or has a NUL, is a template, not a path
        if any(mark in given for mark in "{}\n"):
            return given.encode()
        raise ModelFilesError(f"--chat-template: {given} is neither a file that can be read nor a template: {error}") from None


def converted_tokenizer(tokenizer_dir: Path, cache_dir: Path | None = None) -> bytes:
    """A tokenizer.json made from another format by a child process, kept in the user's cache under a digest of its sources.

    If the cache cannot be written to, it is made in a temporary folder at each launch.
    """
    cache_dir = cache_dir or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quire" / "tokenizers"
    sources = [tokenizer_dir / name for name in (*CONVERTIBLE, *TOKENIZER_SETTINGS) if (tokenizer_dir / name).is_file()]
    digest = hashlib.sha256(CONVERTER_VERSION)
    for source in sources:
        data = source.read_bytes()
        digest.update(f"{source.name}\0{len(data)}\0".encode() + data)
    result = cache_dir / digest.hexdigest() / "tokenizer.json"
    if not result.is_file():
        try:
            result.parent.mkdir(parents=True, exist_ok=True)
            _convert(tokenizer_dir, result)
        except OSError as error:
            return _converted_for_now(tokenizer_dir, digest.hexdigest(), str(error))
    return result.read_bytes()


@functools.lru_cache(maxsize=1)
def _converted_for_now(tokenizer_dir: Path, digest: str, refused: str) -> bytes:
    try:
        with tempfile.TemporaryDirectory(prefix="quire-tokenizer-") as folder:
            result = Path(folder) / "tokenizer.json"
            _convert(tokenizer_dir, result)
            return result.read_bytes()
    except OSError as error:
        raise ModelFilesError(
            f"there is no folder to convert the tokenizer in {tokenizer_dir} in: neither the cache ({refused}; XDG_CACHE_HOME "
            f"moves it) nor a temporary one ({error}; TMPDIR moves it)"
        ) from None


def _convert(tokenizer_dir: Path, result: Path) -> None:
    """Run the converter and put its result in place with one rename, so that no reader sees half a file."""
    out = Path(tempfile.mkdtemp(dir=result.parent))
    command = [sys.executable, "-P", "-m", "quire.enginecore.loading.convert_tokenizer", str(tokenizer_dir), str(out)]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=CONVERSION_TIMEOUT_S, stdin=subprocess.DEVNULL)
        if child.returncode != 0 or not (out / "tokenizer.json").is_file():
            reason = (child.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise ModelFilesError(f"the tokenizer in {tokenizer_dir} cannot be converted to tokenizer.json: {reason}")
        os.replace(out / "tokenizer.json", result)
    except subprocess.TimeoutExpired:
        raise ModelFilesError(f"converting the tokenizer in {tokenizer_dir} took over {CONVERSION_TIMEOUT_S} s") from None
    finally:
        shutil.rmtree(out, ignore_errors=True)
