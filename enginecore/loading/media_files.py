"""The files that a frontend needs to preprocess what a model takes beside text: the checkpoint's processor, and its config.

They are part of the handshake (model_files.py), where the model takes such items, so that a frontend elsewhere works, too.
"""

from pathlib import Path

from quire.ipc.messages.media import MediaInfo

_FILES = ("config.json", "preprocessor_config.json", "processor_config.json")


def processor_files(model_dir: Path, media: MediaInfo | None) -> dict[str, bytes]:
    """By name, those that are there. media: what the model takes; None: text alone, and there are no such files."""
    if media is None:
        return {}
    return {name: (model_dir / name).read_bytes() for name in _FILES if (model_dir / name).is_file()}
