"""Reduces a model's JSON settings to what matters: without the program that wrote them, its version, and the order of fields.

Copies of a model that different programs have saved are one model. `plain` gives the same bytes for them, for fingerprint.py
and for the files that frontends are sent (model_files.py). Fields count unless they are known to change nothing.
"""

import json
from typing import Any

# Fields of config.json and generation_config.json on their origin, and on how transformers runs the model; see
# workers/models/fields.py.
BOOKKEEPING = frozenset({
    "_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "unsloth_version", "unsloth_fixed",
    "transformers.js_config", "_from_model_config", "use_cache", "_attn_implementation", "_attn_implementation_autoset",
    "_attn_implementation_internal", "attn_implementation", "_experts_implementation",
})  # fmt: skip


def plain(fields: dict[str, Any]) -> bytes:
    """JSON of the fields that matter, sorted, with one spelling of the dtype, also within parts such as text_config."""
    return json.dumps(_plain(fields), sort_keys=True).encode()


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in fields.items() if name not in (*BOOKKEEPING, "dtype", "torch_dtype")}
    dtype = fields.get("torch_dtype") if fields.get("dtype") is None else fields["dtype"]
    if dtype is not None:
        kept["dtype"] = dtype.removeprefix("torch.") if isinstance(dtype, str) else dtype
    return {n: _plain(v) if n.endswith("_config") and isinstance(v, dict) else v for n, v in kept.items()}
