"""Parts of messages that are media: found in a conversation, turned into Sources, and left as places for the chat template.

The parts are OpenAI's: {"type": "image_url", "image_url": {"url", "detail"}}, or {"type": "input_image", "image_url",
"file_id", "detail"}. Routes of other APIs translate theirs into the first, with the field that errors shall name as "place".
"""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.frontend.media.errors import MediaError
from quire.frontend.media.sources import Source

Cut = Mapping[str, memoryview]  # strings that were cut out of a body, by what stands in their place
PLACE = "place"
_IMAGES = ("image_url", "input_image", "image")
_OTHERS = frozenset(
    ("input_audio", "audio_url", "audio", "video_url", "input_video", "video", "file", "input_file", "image_embeds",
     "prompt_embeds", "image_pil")
)  # fmt: skip
_TEXTS = ("text", "input_text", "output_text", "refusal")
_DETAILS = (None, "auto", "low", "high", "original")
_NOTHING: Cut = {}


def has_media(messages: Any) -> bool:
    """Whether any message has a part that is no text."""
    return isinstance(messages, list) and any(_kind(part) for message in messages for part in _parts(message))


def take(messages: Sequence[Any], cut: Cut = _NOTHING) -> tuple[list[Any], list[Source]]:
    """The messages with {"type": "image"} in the place of each image, and the images in order. Raises MediaError."""
    taken, sources = list(messages), list[Source]()
    for i, message in enumerate(messages):
        parts = _parts(message)
        if not any(map(_kind, parts)):
            continue
        content = list(parts)
        for j, part in enumerate(parts):
            if (kind := _kind(part)) is not None:
                sources.append(_source(part, kind, f"messages[{i}].content[{j}]", cut))
                content[j] = {"type": "image"}
        taken[i] = {**message, "content": content}
    return taken, sources


def check(messages: Any) -> None:
    """Raises MediaError for the first part that is neither a text nor media."""
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        for j, part in enumerate(_parts(message)):
            kind = part.get("type") if isinstance(part, dict) else "text"
            if kind in _TEXTS or _kind(part):
                continue
            what = "has no type" if kind is None else f"of type {str(kind)[:40]!r} is not taken"
            place = _place(part, f"messages[{i}].content[{j}]")
            raise MediaError(f"a part {what}: text, image_url and input_image are", place, "unsupported_value")


def refuse(messages: Any) -> None:
    """Raises MediaError for the first part that a model of text alone cannot take."""
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        for j, part in enumerate(_parts(message)):
            if (kind := _kind(part)) is not None:
                place = _place(part, f"messages[{i}].content[{j}]")
                raise MediaError(f"this model takes text only, no {kind}", place, "unsupported_value")


def _parts(message: Any) -> Sequence[Any]:
    content = message.get("content") if isinstance(message, dict) else None
    return content if isinstance(content, list) else ()


def _kind(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    return kind if isinstance(kind, str) and (kind in _IMAGES or kind in _OTHERS) else None


def _place(part: Mapping[str, Any], place: str) -> str:
    given = part.get(PLACE)
    return given[:256] if isinstance(given, str) and given else place


def _source(part: Mapping[str, Any], kind: str, place: str, cut: Cut) -> Source:
    place = _place(part, place)
    if kind not in ("image_url", "input_image"):
        raise MediaError(f"this model takes text and images, no part of type {kind!r}", place, "unsupported_value")
    given = part.get("image_url")
    fields = given if isinstance(given, dict) else {}
    url, detail = fields.get("url") if fields else given, fields.get("detail", part.get("detail"))
    if detail not in _DETAILS:
        raise MediaError("detail must be auto, low, high or original", place)
    file_id = part.get("file_id", fields.get("file_id"))
    if isinstance(file_id, str) and file_id and url is None:
        return Source(place, file_id=file_id, low_detail=detail == "low")
    if url is None and ("uuid" in part or "uuid" in fields):
        raise MediaError("an image is sent with each request, uuid does not stand for one", place, "unsupported_value")
    if not isinstance(url, str) or not url:
        raise MediaError("an image needs an image_url with a url", place)
    return Source(place, low_detail=detail == "low", **_address(url, cut, place))


def _address(url: str, cut: Cut, place: str) -> dict[str, Any]:
    """The field of Source for a URL, which may stand for a string that was cut out, as a whole or behind its comma."""
    if not cut:
        return {"url": url}
    _, comma, rest = url.partition(",")
    if comma and rest in cut:
        return {"text": cut[rest]}
    if url not in cut:
        return {"url": url}
    text = cut[url]
    begin = bytes(text[:256])
    if not begin[:5].lower() == b"data:" or (comma_at := begin.find(b",")) < 0:
        raise MediaError("the address is too long", place)
    if not begin[:comma_at].lower().endswith(b";base64"):
        raise MediaError("a data: URL must be like data:image/png;base64,...", place)
    return {"text": text[comma_at + 1 :]}


def forget_places(items: Sequence[Any]) -> None:
    """Remove the fields that errors shall name from items of a response, which are kept."""
    for item in items:
        for value in (item.get("content"), item.get("output")):
            for part in value if isinstance(value, list) else ():
                if isinstance(part, dict):
                    part.pop(PLACE, None)


def with_cut(value: Any, cut: Cut) -> Any:
    """JSON data with the strings in their places again that were cut out."""
    if isinstance(value, str):
        head, comma, rest = value.partition(",")
        if comma and rest in cut:
            return f"{head},{str(cut[rest], 'ascii')}"
        return str(cut[value], "ascii") if value in cut else value
    if isinstance(value, list):
        return [with_cut(each, cut) for each in value]
    return {name: with_cut(each, cut) for name, each in value.items()} if isinstance(value, dict) else value
