"""jina-embeddings-v5: a base model of another family, and an adapter for each of its tasks, of which one is merged.

`jina_task` in --hf-overrides names the task; without it retrieval is served, as by vLLM. BY_REQUEST merges none: requests
choose among the tasks' adapters (enginecore/loading/task_adapters.py).
"""

from pathlib import Path
from typing import Any

from quire.ipc.encoders import BY_REQUEST, JINA_V5, architecture_of
from quire.workers.models.config import ModelConfigError

DEFAULT_TASK = "retrieval"
_OF_TASKS = ("task_names", "jina_task", "is_decoder", "auto_map")


def read_jina_v5(fields: dict[str, Any], folder: Path) -> tuple[dict[str, Any], str | None]:
    """(config.json as that of the base model, the folder of the task's adapter); other models' fields as they are.

    Raises ModelConfigError for a task that the checkpoint does not have."""
    if fields.get("architectures") != [JINA_V5]:
        return fields, None
    task = fields.get("jina_task") or DEFAULT_TASK
    if task == BY_REQUEST:
        return _plain(fields), None
    given = fields.get("task_names")
    tasks = [str(name) for name in given] if isinstance(given, list) else []
    if task not in tasks:
        raise ModelConfigError(f"jina_task {task!r:.60} is not among the checkpoint's tasks: {', '.join(tasks) or 'none'}")
    adapter = folder / "adapters" / str(task)
    if not adapter.is_dir():
        raise ModelConfigError(f"{adapter} is not there: it has the adapter of the task {task}")
    return _plain(fields), str(adapter)


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in fields.items() if name not in _OF_TASKS}
    return {**plain, "architectures": [architecture_of(fields)]}
