"""Images of `quire chat`: a file becomes the part of a message that any OpenAI-compatible server takes."""

import base64
import os
from typing import Any

from quire.frontend.cli.api_address import ChatError

_MOST_BYTES = 32 << 20
_TYPES = {
    b"\xff\xd8\xff": "image/jpeg",
    b"\x89PNG": "image/png",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
    b"BM": "image/bmp",
}


def image_part(path: str) -> dict[str, Any]:
    """The file as a data: URL. Raises ChatError."""
    path = os.path.expanduser(path.strip("'\""))
    try:
        if os.path.getsize(path) > _MOST_BYTES:
            raise ChatError(f"{path} has more than {_MOST_BYTES >> 20} MiB")
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES)
    except OSError as error:
        raise ChatError(f"{path}: {error.strerror}") from None
    kind = next((kind for magic, kind in _TYPES.items() if data.startswith(magic)), None)
    if kind is None:
        raise ChatError(f"{path} is no image: JPEG, PNG, WebP, GIF and BMP are taken")
    url = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}
