"""Downloads from the hub, through huggingface_hub's cache, environment variables and progress bars; its errors in our words.

Called by model_files.py at the core's launch, and by the process that downloads adapters (adapters/download.py).
"""

import re
from pathlib import Path
from typing import Any

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class ModelFilesError(ValueError):
    """The model's files are not there or not readable; the text is meant for the user and says what to do."""


class RepositoryMissing(ModelFilesError):
    """The hub has no such repository, or none that this token may read."""


def is_hub_id(name: str) -> bool:
    return HUB_ID.fullmatch(name) is not None and ".." not in name and "--" not in name


def download(
    hub_id: str,
    revision: str | None,
    download_dir: str | None,
    patterns: list[str],
    token: str | None,
    ignored: list[str] | None = None,
    kind: str = "a model",
) -> Path:
    """Snapshot of a hub repository: those of its files that a pattern names and none of `ignored` does. kind: what it should
    have, for errors. Raises ModelFilesError."""
    import huggingface_hub
    from huggingface_hub import errors

    at = f" at revision {revision}" if revision else ""
    try:
        of_repository: dict[str, Any] = {"revision": revision, "cache_dir": download_dir, "token": token}
        return Path(
            huggingface_hub.snapshot_download(hub_id, allow_patterns=patterns, ignore_patterns=ignored, **of_repository)
        )
    except errors.GatedRepoError:
        raise ModelFilesError(
            f"{hub_id} is gated: accept its terms on the hub, then set HF_TOKEN to a token of that account"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelFilesError(f"{hub_id} has no revision {revision or 'main'} on the hub") from None
    except errors.RepositoryNotFoundError:
        raise RepositoryMissing(
            f"{hub_id} is neither a local folder nor {kind} on the hub. If it is private, set HF_TOKEN to a token that "
            "may read it"
        ) from None
    except errors.LocalEntryNotFoundError as error:
        raise ModelFilesError(
            f"{hub_id}{at} is not (completely) in the local cache, and the hub cannot be reached: connect, unset "
            f"HF_HUB_OFFLINE, or give a local folder. {_first_line(error)}"
        ) from None
    except errors.HFValidationError as error:
        raise ModelFilesError(f"{hub_id} is not a hub id: {_first_line(error)}") from None
    except Exception as error:  # from the disk, the hub's answers, or the HTTP library that huggingface_hub uses
        raise ModelFilesError(f"{hub_id}{at} cannot be downloaded: {type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
