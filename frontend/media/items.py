"""Media: a frontend's items: read, named by a digest, preprocessed by its children, and kept for when the engine asks.

An item's facts (how many tokens it becomes, its positions, its tensors' shapes) are kept by digest for long; its tensors within
--mm-processor-cache-gb. So an image that was seen before is not decoded again, and one that the engine asks for later than that
is made anew from its source, which a request keeps until it has ended.
"""

import asyncio
import hashlib
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from quire.frontend.client.turns import in_native_thread
from quire.frontend.media.child_messages import Answer, Question
from quire.frontend.media.children import MediaChildren
from quire.frontend.media.errors import MediaBusy, MediaError
from quire.frontend.media.families import FILES, Family, family_of
from quire.frontend.media.fetch import Fetcher
from quire.frontend.media.options import MediaOptions, parse_domain
from quire.frontend.media.sources import Reader, ReadFile, Source, too_many_bytes
from quire.ipc.media import MAX_MEDIA_BYTES, MAX_REQUEST_PIXELS, MAX_TENSOR_BYTES, REFUSED_S
from quire.ipc.messages.media import MediaItem

_MAX_FACTS = 16_384  # items of which facts are kept: some 3 kB each
_LEAST_CACHE = 128 << 20  # so that an item's tensors are there when the engine asks at once
_HASHED_AT_ONCE = 256 << 10

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Answer).decode


class PreparedItem:
    """An item of one request. It holds the source, of which its tensors can be made again."""

    def __init__(self, media: "Media", kind: str, digest: bytes, facts: Answer, question: Question, owner: str) -> None:
        self._media = media
        self.kind = kind
        self.digest = digest
        self.question = question
        self.owner = owner
        self.num_tokens = facts.num_tokens
        self.facts = facts

    async def tensors(self) -> list[bytes]:
        """As `Media.tensors`."""
        return await self._media.tensors(self)

    def wire(self, start: int) -> MediaItem:
        """As it travels in TokenInputs, with its placeholders from this token on."""
        facts = self.facts
        spans = list[tuple[int, int]]()
        for text, count in facts.pieces:
            if not text:
                spans.append((start, count))
            start += count
        return MediaItem(
            self.kind,
            self.digest,
            spans,
            facts.tensors,
            facts.positions,
            facts.advance,
            facts.rescale,
        )


class Media:
    """For one event loop. files: of the handshake (families.FILES). model_digest: a part of each item's digest.

    count: called with "queries" for each item, and with "hits" if its facts are known. held_bytes: of sources.
    """

    def __init__(self, files: Mapping[str, bytes], options: MediaOptions, model_digest: str) -> None:
        """Raises ValueError for files of a model that is not known to take media."""
        self.family: Family = family_of(files)
        self.options = options
        self.held_bytes = 0
        self.count: Callable[[str], None] = lambda label: None
        given = {name: data for name, data in files.items() if name in FILES}
        self._children = MediaChildren(given, options.processor_options, options.num_children)
        self._reader = Reader(Fetcher(tuple(map(parse_domain, options.domains))), options.local_path)
        self._same = hashlib.sha256(
            msgspec.json.encode([model_digest, options.processor_options, sorted((n, hashlib.sha256(d).hexdigest()) for n, d in
                                 given.items())])
        ).digest()  # fmt: skip
        self._facts: OrderedDict[bytes, bytes] = OrderedDict()
        self._tensors: OrderedDict[bytes, list[bytes]] = OrderedDict()
        self._tensor_bytes = 0
        self._most_bytes = max(options.cache_bytes, _LEAST_CACHE)
        self._running: dict[bytes, asyncio.Task[Answer]] = {}
        self._refused: dict[tuple[str, bytes], float] = {}  # until when
        self._released: deque[int] = deque()  # bytes of sources that are held no longer; finalizers run anywhere
        self._started: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Make the children ready; concurrent callers wait for the same start. Raises MediaChildrenError."""
        if self._started is None:
            self._started = asyncio.create_task(self._children.start())
        await asyncio.shield(self._started)

    async def close(self) -> None:
        for task in self._running.values():
            task.cancel()
        await self._children.close()

    # ------------------------------------------------------------------------------------------------------- a request
    async def prepare(
        self,
        sources: Sequence[Source],
        owner: str,
        salt: str = "",
        read_file: ReadFile | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[PreparedItem]:
        """A request's items, in order. owner: of its key. options: mm_processor_kwargs, checked. Raises MediaError with the
        item's place, MediaBusy."""
        if len(sources) > self.options.max_images:
            raise MediaError(
                f"a prompt may have {self.options.max_images} images (--limit-mm-per-prompt), this one has {len(sources)}",
                sources[self.options.max_images].place,
                code="too_many_media",
            )
        await self.start()
        left = _Left()
        tasks = [asyncio.create_task(self._prepare(each, owner, salt, read_file, left, options)) for each in sources]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            del tasks

    async def _prepare(
        self,
        source: Source,
        owner: str,
        salt: str,
        read_file: ReadFile | None,
        left: "_Left",
        options: Mapping[str, Any],
    ) -> PreparedItem:
        try:
            data = await self._reader.read(source, owner, left.num_bytes, read_file)
            left.take_bytes(len(data))
            digest = await self._digest(source, data, salt, options)
            shape = list(source.shape) if source.shape is not None else None
            question = Question(data, shape, source.low_detail, dict(options))
            facts = await self._facts_of(digest, question, owner)
            left.take_pixels(facts.size)
        except MediaError as error:
            raise error.at(error.param or source.place) from None
        item = PreparedItem(self, source.kind, digest, facts, question, owner)
        self._hold(item, len(data))
        return item

    async def _digest(self, source: Source, data: bytes, salt: str, options: Mapping[str, Any]) -> bytes:
        settings = msgspec.json.encode([source.kind, source.shape, source.low_detail, salt, dict(options)], order="sorted")
        digest = hashlib.sha256(self._same + len(settings).to_bytes(8, "little") + settings)
        if len(data) > _HASHED_AT_ONCE:
            await in_native_thread(digest.update, data)
        else:
            digest.update(data)
        return digest.digest()

    async def _facts_of(self, digest: bytes, question: Question, owner: str) -> Answer:
        self.count("queries")
        if (known := self._facts.get(digest)) is not None:
            self._facts.move_to_end(digest)
            self.count("hits")
            return _decode(known)
        made = await self._made(digest, question, owner)
        return msgspec.structs.replace(made, data=[])

    async def tensors(self, item: PreparedItem) -> list[bytes]:
        """The item's tensors, in the order of its facts. Raises MediaError, MediaBusy."""
        if (kept := self._tensors.get(item.digest)) is not None:
            self._tensors.move_to_end(item.digest)
            return kept
        return (await self._made(item.digest, item.question, item.owner)).data

    async def _made(self, digest: bytes, question: Question, owner: str) -> Answer:
        """Ask a child, once for all who want the same item now."""
        if self._refused and self._refused.get((owner, digest), 0.0) > time.monotonic():
            raise MediaError("the image cannot be decoded: it took too much time or memory before")
        task = self._running.get(digest)
        if task is None:
            task = self._running[digest] = asyncio.create_task(self._make(digest, question, owner))
            task.add_done_callback(lambda done: self._done(digest, done))
        return await asyncio.shield(task)

    def _done(self, digest: bytes, task: "asyncio.Task[Answer]") -> None:
        del self._running[digest]
        if not task.cancelled():
            task.exception()  # retrieved, also if all who waited have gone

    async def _make(self, digest: bytes, question: Question, owner: str) -> Answer:
        try:
            answer = await self._children.ask(question, owner)
        except OSError:
            raise MediaBusy("no process can read images now") from None
        if answer is None:
            now = time.monotonic()
            self._refused = {key: until for key, until in self._refused.items() if until > now}
            self._refused[owner, digest] = now + REFUSED_S
            raise MediaError("the image cannot be decoded: it takes too much time or memory")
        if answer.error:
            raise MediaError(answer.error)
        if max(map(len, answer.data)) > MAX_TENSOR_BYTES:
            raise MediaError("the image is too large for the model's processor")
        self._keep(digest, answer)
        return answer

    def _keep(self, digest: bytes, answer: Answer) -> None:
        self._facts[digest] = _encode(msgspec.structs.replace(answer, data=[]))
        if len(self._facts) > _MAX_FACTS:
            self._facts.popitem(last=False)
        if digest not in self._tensors:
            self._tensors[digest] = answer.data
            self._tensor_bytes += sum(map(len, answer.data))
        while self._tensor_bytes > self._most_bytes and len(self._tensors) > 1:
            _, dropped = self._tensors.popitem(last=False)
            self._tensor_bytes -= sum(map(len, dropped))

    def _hold(self, item: PreparedItem, num_bytes: int) -> None:
        """Count the bytes that the item holds, until it is gone. Raises MediaBusy if they are too many."""
        while self._released:
            self.held_bytes -= self._released.popleft()
        if self.held_bytes + num_bytes > self.options.max_held_bytes:
            raise MediaBusy("too many media are in memory")
        self.held_bytes += num_bytes
        weakref.finalize(item, self._released.append, num_bytes).atexit = False


class _Left:
    """The rest of a request's bounds, for its further items."""

    def __init__(self) -> None:
        self.num_bytes, self._num_pixels = MAX_MEDIA_BYTES, MAX_REQUEST_PIXELS

    def take_bytes(self, number: int) -> None:
        self.num_bytes -= number
        if self.num_bytes < 0:
            raise too_many_bytes(MAX_MEDIA_BYTES)

    def take_pixels(self, size: Sequence[int]) -> None:
        self._num_pixels -= size[0] * size[1]
        if self._num_pixels < 0:
            raise MediaError(f"the images of a request may have {MAX_REQUEST_PIXELS // 10**6} megapixels together")
