"""Images beside a prompt in Python: `multi_modal_data` as in vLLM, and images in the messages of a chat.

An image is a PIL image, a numpy array of uint8 [height, width (, channels)], bytes of a file, a path, or an address. In a text
or token ids beside `multi_modal_data`, the placeholders are the caller's: one for each image, as the chat template writes it.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from quire.frontend.client.engine_options import MEDIA_OPTIONS
from quire.frontend.client.media import PlacedItem
from quire.frontend.client.prompt import PromptParts
from quire.frontend.client.stream import InvalidRequest
from quire.frontend.media import parts, placeholders, request_options
from quire.frontend.media.families import family_of
from quire.frontend.media.items import Media
from quire.frontend.media.options import MediaOptions
from quire.frontend.media.sources import Source
from quire.frontend.text.tokenizer import Tokenizer
from quire.ipc.messages.frontend import Welcome


class MediaClient(Protocol):
    """A client, as far as media need it."""

    media: Media | None
    media_options: MediaOptions

    @property
    def files(self) -> Mapping[str, bytes]: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def welcome(self) -> Welcome: ...


_ADDRESSES = ("data:", "http:", "https:", "file:")
_NO_BOUND = 1 << 62


def media_options(options: Mapping[str, Any]) -> MediaOptions:
    """Those among an engine's options in Python. The caller's own images are not bounded in memory."""
    given = {name: options[name] for name in MEDIA_OPTIONS if options.get(name) is not None}
    return MediaOptions(
        limits=dict(given.get("limit_mm_per_prompt", {})),
        domains=tuple(given.get("allowed_media_domains", ())),
        local_path=given.get("allowed_local_media_path", ""),
        num_children=min(max((os.cpu_count() or 2) // 2, 1), 4),
        cache_bytes=int(given.get("mm_processor_cache_gb", 4.0) * (1 << 30)),
        processor_options=dict(given.get("mm_processor_kwargs", {})),
        max_held_bytes=_NO_BOUND,
    )


def sources_of(data: Any) -> list[Source]:
    """The images of multi_modal_data, {"image": one or a list}. Raises InvalidRequest."""
    if not isinstance(data, Mapping):
        raise InvalidRequest("multi_modal_data must be a dict like {'image': image}")
    if other := [str(kind) for kind, value in data.items() if kind != "image" and value is not None]:
        raise InvalidRequest(f"multi_modal_data: only images are taken, no {', '.join(other)}")
    given = data.get("image")
    images = list(given) if isinstance(given, list | tuple) else [] if given is None else [given]
    return [source_of(image, f"multi_modal_data['image'][{i}]") for i, image in enumerate(images)]


def source_of(image: Any, place: str) -> Source:
    if isinstance(image, Source):
        return image
    if isinstance(image, bytes | bytearray | memoryview):
        return Source(place, data=bytes(image))
    if isinstance(image, str) and image.startswith(_ADDRESSES):
        return Source(place, url=image)
    if isinstance(image, str | os.PathLike):
        try:
            return Source(place, data=Path(image).read_bytes())
        except OSError as error:
            raise InvalidRequest(f"{place}: {image} cannot be read: {error.strerror}") from None
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8:
            raise InvalidRequest(f"{place}: an array of an image holds uint8, not {image.dtype}")
        return Source(place, data=np.ascontiguousarray(image).tobytes(), shape=image.shape)
    if hasattr(image, "convert") and hasattr(image, "mode"):  # PIL's; it is not imported here
        plain = image if image.mode in ("L", "RGB", "RGBA") else image.convert("RGBA" if "A" in image.mode else "RGB")
        array = np.asarray(plain)
        return Source(place, data=array.tobytes(), shape=array.shape)
    raise InvalidRequest(f"{place}: an image is a PIL image, an array, bytes, a path or an address, not {type(image).__name__}")


async def placed(
    client: MediaClient, ids: Sequence[int], data: Any, salt: str, options: Any = None
) -> tuple[list[int], tuple[PlacedItem, ...]]:
    """The prompt's ids with as many placeholders as its images have embeddings, and the images. options: mm_processor_kwargs.
    Raises InvalidRequest."""
    sources = sources_of(data)
    media = await opened(client)
    items = await media.prepare(sources, "", salt, options=request_options.checked(options, media.family))
    grown = placeholders.grow(client.tokenizer, media.family, ids, [item.facts.pieces for item in items])
    return grown.ids, tuple(map(PlacedItem, items, grown.starts))


def written(client: MediaClient, given: PromptParts) -> str:
    """A prompt's text, with what the model's processor writes around its images."""
    assert given.text is not None
    if given.media is None or client.welcome.limits.media is None:
        return given.text
    return family_of(client.files).written(given.text)[0]


async def with_media(client: MediaClient, given: PromptParts) -> PromptParts:
    """The prompt with its media as PlacedItems, and its ids as `placed` returns them."""
    if given.media is None:
        return given._replace(media=())
    ids, items = await placed(client, given.ids or (), given.media, given.cache_salt, given.media_options)
    return given._replace(ids=ids, media=items, marks=())


async def open_media(client: MediaClient) -> None:
    """If the model takes media, start the processes that read them, once. Raises ValueError, MediaChildrenError."""
    options, welcome = client.media_options, client.welcome
    if client.media is None and welcome.limits.media is not None and options.max_images:
        client.media = Media(client.files, options, welcome.model_digest)
    if client.media is not None:
        await client.media.start()


async def close_media(client: MediaClient) -> None:
    media, client.media = client.media, None
    if media is not None:
        await media.close()


async def opened(client: MediaClient) -> Media:
    """Raises InvalidRequest if the model takes none."""
    await open_media(client)
    if client.media is None:
        raise InvalidRequest("this model takes text only, no images")
    return client.media


def chat_with_media(client: MediaClient, messages: list[Any], options: dict[str, Any]) -> dict[str, Any]:
    """A conversation with images as a prompt; its media must be open. Raises InvalidRequest."""
    media, tokenizer = client.media, client.tokenizer
    assert media is not None
    sources = list[Source]()
    messages = [_with_sources(message, sources) for message in messages]
    taken, found = parts.take(messages)
    given = {name: options.get(name) for name in ("tools", "documents", "chat_template_kwargs")}
    (taken, given), hidden = placeholders.hide([taken, given], media.family)
    text = tokenizer.render_chat(taken, **{**options, **given}, placeholders={"image": media.family.in_text})
    ids = placeholders.encode_here(tokenizer, media.family, text, hidden)
    own = iter(sources)
    images = [next(own) if source.url == _OWN else source for source in found]
    return {"prompt": hidden.shown(text), "prompt_token_ids": ids, "multi_modal_data": {"image": images}}


_OWN = "data:own"


def _with_sources(message: Any, sources: list[Source]) -> Any:
    """A message without its images that are objects of Python, which are set aside."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return message
    kept = []
    for part in content:
        image = None
        if isinstance(part, Mapping) and part.get("type") in ("image", "image_pil"):
            image = part.get("image", part.get("image_pil"))
        if image is None:
            kept.append(part)
            continue
        sources.append(source_of(image, "messages"))
        kept.append({"type": "image_url", "image_url": {"url": _OWN}})
    return {**message, "content": kept}
