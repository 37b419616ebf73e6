"""RequestMedia: the media of one HTTP request on their way into its prompt.

`prompt.py` calls `begin` before the chat template renders: items are read and preprocessed meanwhile. `finish` puts them into
the rendered prompt's tokens.
"""

import asyncio
from typing import Any, NamedTuple

from msgspec.structs import replace

from quire.frontend.client.client import Client
from quire.frontend.client.media import PlacedItem
from quire.frontend.http.api.files import read_whole
from quire.frontend.http.api.services import Services
from quire.frontend.http.protocol.exchange import Request
from quire.frontend.media import parts, placeholders, request_options
from quire.frontend.media.errors import MediaError
from quire.frontend.media.items import PreparedItem
from quire.frontend.media.placeholders import Hidden
from quire.frontend.text.request_templates import ToRender
from quire.frontend.text.tokenizer import ChatPrompt


class Begun(NamedTuple):
    """A prompt while its items are read."""

    wanted: ToRender
    hidden: Hidden
    items: "asyncio.Task[list[PreparedItem]]"


class RequestMedia:
    """salt: of the request's cache. Its items are the owner's of its key, and so are files that it names."""

    def __init__(self, services: Services, request: Request) -> None:
        self._services = services
        self._owner = request.owner
        self._cut = request.cut_out
        self.salt = ""

    def begin(self, client: Client, wanted: ToRender, options: Any = None) -> Begun | None:
        """None if there are no media. options: mm_processor_kwargs of the request. Raises MediaError."""
        settings: dict[str, Any] = {}
        if options:
            settings = request_options.trusted(options, client.media, client.media_options.trusts_requests)
        if (media := client.media) is not None:
            parts.check(wanted.messages)
        if not parts.has_media(wanted.messages):
            return None
        if media is None:
            parts.refuse(wanted.messages)
            return None
        messages, sources = parts.take(wanted.messages, self._cut)
        given = [messages, wanted.tools, wanted.documents, wanted.variables]
        (messages, tools, documents, variables), hidden = placeholders.hide(given, media.family)
        marked = replace(
            wanted,
            messages=messages,
            tools=tools,
            documents=documents,
            variables=variables,
            placeholders={"image": media.family.in_text},
        )
        preparing = asyncio.create_task(media.prepare(sources, self._owner, self.salt, self._read_file, settings))
        return Begun(marked, hidden, preparing)

    def release(self) -> None:
        """Forget the strings that were cut out of the body, and so the body: the answer may take minutes."""
        self._cut.clear()

    async def _read_file(self, id: str, most: int) -> bytes | None:
        return await read_whole(self._services.storage, self._owner, id, most)


async def finish(
    client: Client, begun: Begun, text: str, source: str, ends: list[int], add_special_tokens: bool, keep: int | None
) -> tuple[ChatPrompt, list[int]]:
    """The rendered text as a prompt with its items. Raises MediaError, MediaBusy, TooLong."""
    media = client.media
    assert media is not None
    limit = client.welcome.limits.max_model_len
    ids, marks = await placeholders.encode(
        client.tokenizer, media.family, text, begun.hidden, add_special_tokens, limit, ends
    )  # fmt: skip
    items = await begun.items
    grown = placeholders.grow(client.tokenizer, media.family, ids, [item.facts.pieces for item in items], marks)
    if keep is not None and len(grown.ids) > keep:
        raise MediaError("it would cut a prompt that has images", "truncate_prompt_tokens")
    placed = tuple(map(PlacedItem, items, grown.starts))
    return ChatPrompt(begun.hidden.shown(text), source, grown.marks, placed), grown.ids
