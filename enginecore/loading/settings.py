"""A model's JSON settings without what changes nothing: by whom they were written, with which version, in which order.

Copies of one model that different programs saved are one model. `plain` gives the same bytes for them, for fingerprint.py and
for the files that frontends are sent (model_files.py). A field that is not known to change nothing counts.
"""

import json
from typing import Any

# Of config.json and generation_config.json: who wrote it, and how transformers runs the model (workers/models/fields.py).
BOOKKEEPING = frozenset({
    "_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "unsloth_version", "unsloth_fixed",
    "transformers.js_config", "_from_model_config", "use_cache", "_attn_implementation", "_attn_implementation_autoset",
    "_attn_implementation_internal", "attn_implementation", "_experts_implementation",
})  # fmt: skip


def plain(fields: dict[str, Any]) -> bytes:
    """JSON of the fields that count, in order, the dtype spelled one way, in parts as text_config, too."""
    return json.dumps(_plain(fields), sort_keys=True).encode()


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in fields.items() if name not in (*BOOKKEEPING, "dtype", "torch_dtype")}
    dtype = fields.get("torch_dtype") if fields.get("dtype") is None else fields["dtype"]
    if dtype is not None:
        kept["dtype"] = dtype.removeprefix("torch.") if isinstance(dtype, str) else dtype
    return {n: _plain(v) if n.endswith("_config") and isinstance(v, dict) else v for n, v in kept.items()}
