"""transformers' tokenizer of a served model, for scripts that call it as `llm.get_tokenizer()` returns it in vLLM.

It is read from the model's local files, when it is first asked for, because importing transformers takes seconds. The engine
itself never uses it: it has the tokenizer of frontend/text. Where transformers cannot read the folder without running its code,
the engine's own tokenizer is wrapped in transformers' class.
"""

import logging
from typing import Any

from quire.frontend.client.client import Client
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.config import EngineConfig

log = logging.getLogger("quire")

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def transformers_tokenizer(options: EngineConfig, client: Client) -> Any:
    """A PreTrainedTokenizer. Raises InvalidRequest if the engine has no tokenizer, EngineDown if it has been shut down."""
    own = client.tokenizer
    source, revision = _source(options)
    if source is not None:
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(
                source, revision=revision, cache_dir=options.download_dir, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # a checkpoint's files may be anything, and transformers raises what it meets
            log.info("transformers cannot read the tokenizer of %s (%s): the engine's own is wrapped", source, error)
    return _wrapped(own)


def _source(options: EngineConfig) -> tuple[str | None, str | None]:
    """The folder or hub id of the tokenizer, and its revision; None: the bundled model."""
    if options.tokenizer is not None:
        return options.tokenizer, options.tokenizer_revision
    return options.model, options.tokenizer_revision or options.revision


def _wrapped(own: Tokenizer) -> Any:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    named = {name: own.special_tokens[name] for name in _NAMES if name in own.special_tokens}
    copy = tokenizers.Tokenizer.from_str(own.backend.to_str())
    made = PreTrainedTokenizerFast(tokenizer_object=copy, **named)
    made.chat_template = own.templates if len(own.templates) > 1 else own.templates.get("default")
    return made
