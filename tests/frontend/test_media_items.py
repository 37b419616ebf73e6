"""A client's work with items: routing, answering the engine's questions, and keeping facts and tensors by digest."""

import asyncio
import json

import numpy as np
import pytest
import seeing_model
from fake_core import FakeCore

from quire.frontend.client.async_client import AsyncClient
from quire.frontend.client.media import routing_ids
from quire.frontend.client.media_data import open_media
from quire.frontend.client.stream import InvalidRequest
from quire.frontend.media import families, request_options
from quire.frontend.media.errors import MediaBusy, MediaError
from quire.frontend.media.options import MediaOptions
from quire.frontend.media.sources import Source
from quire.ipc.messages.frontend import AddRequest, EngineLimits, TokenInputs
from quire.ipc.messages.media import MediaData, MediaGone, MediaInfo, MediaItem, MediaWanted
from quire.ipc.sampling import SamplingParams

LIMITS = EngineLimits(
    max_model_len=512, vocab_size=504, max_num_seqs=4, max_logprobs=20, media=MediaInfo(["image"], 100)
)  # fmt: skip
A, B = seeing_model.image(90, 60, 1), seeing_model.image(40, 150, 2)
PROMPT = "a<|vision_start|><|image_pad|><|vision_end|>b<|vision_start|><|image_pad|><|vision_end|>"


def with_client(use, **options):
    async def run():
        with FakeCore(files=seeing_model.files(), limits=LIMITS) as core:
            async with AsyncClient(core.address) as client:
                client.media_options = MediaOptions(**options)
                await open_media(client)
                return await use(core, client)

    return asyncio.run(run())


def source(image):
    return Source("here", data=seeing_model.png(image))


def prompt(*images):
    return {"prompt": PROMPT, "multi_modal_data": {"image": list(images)}}


async def submitted(client, *images, salt=""):
    given = await client.resolve(prompt(*images), salt)
    return client.submit(given.ids, SamplingParams(max_tokens=1), items=given.media, cache_salt=salt)


def test_a_request_names_its_items_and_answers_questions():
    async def use(core, client):
        stream = await submitted(client, A, B)
        sent = await asyncio.to_thread(core.next, AddRequest)
        ids = np.frombuffer(sent.inputs.token_ids, np.int32)
        first, second = sent.inputs.items
        for item in (first, second):
            ((start, count),) = item.spans
            assert (ids[start : start + count] == 500).all() and ids[start - 1] == 501 and ids[start + count] == 502
            assert len(item.positions) == 3 and len(item.positions[0]) == count == item.num_tokens
        assert first.digest != second.digest and len(first.digest) == 32
        for index in (1, 0, 1):
            core.say(MediaWanted(core.epoch, sent.id, index))
            answer = await asyncio.to_thread(core.next, MediaData)
            item = sent.inputs.items[index]
            assert (answer.request_id, answer.index, answer.digest) == (sent.id, index, item.digest)
            assert [len(data) for data in answer.tensors] == [tensor.num_bytes for tensor in item.tensors]
        core.say(MediaWanted(core.epoch, sent.id, 7), MediaWanted(core.epoch, sent.id + 1, 0))  # neither is answered
        core.say(MediaWanted(core.epoch, sent.id, 0))
        assert (await asyncio.to_thread(core.next, MediaData)).index == 0
        stream.cancel()

    with_client(use)


def test_an_image_is_decoded_once():
    async def use(core, client):
        asked = []
        ask = client.media._children.ask

        async def counted(question, owner):
            asked.append(question)
            return await ask(question, owner)

        client.media._children.ask = counted
        items = await asyncio.gather(*(client.media.prepare([source(A)], "", "") for _ in range(8)))
        assert len(asked) == 1 and len({item.digest for (item,) in items}) == 1
        await client.media.prepare([source(A), source(B), source(A)], "", "")
        assert len(asked) == 2
        (item,) = items[0]
        await item.tensors()
        assert len(asked) == 2
        client.media._tensors.clear()  # as if others had taken their place
        assert [len(data) for data in await item.tensors()] == [each.num_bytes for each in item.facts.tensors]
        assert len(asked) == 3

    with_client(use)


def test_salt_detail_and_shape_are_part_of_the_digest():
    async def use(core, client):
        array = np.asarray(A)
        raw = Source("", data=array.tobytes(), shape=array.shape)
        given = [(source(A), ""), (source(A), "salt"), (source(A)._replace(low_detail=True), ""), (raw, "")]
        digests = {(await client.media.prepare([each], "", salt))[0].digest for each, salt in given}
        assert len(digests) == 4
        same = (await client.media.prepare([source(A)._replace(place="elsewhere")], "other", ""))[0].digest
        assert same in digests

    with_client(use)


def test_settings_of_a_request_size_its_images_and_are_part_of_the_digest():
    async def use(core, client):
        async def item(options):
            return (await client.resolve({**prompt(A, A), "mm_processor_kwargs": options})).media[0].item

        plain, small, same = await item(None), await item({"max_pixels": 28 * 28 * 2}), await item({"max_pixels": 28 * 28 * 2})
        least, edge = await item({"min_pixels": 28 * 28 * 12}), await item({"size": {"longest_edge": 28 * 28 * 2}})
        assert (plain.num_tokens, small.num_tokens, edge.num_tokens) == (6, 1, 1) and least.num_tokens > 8
        assert small.digest == same.digest and len({each.digest for each in (plain, small, least, edge)}) == 4
        assert len((await small.tensors())[0]) < len((await plain.tensors())[0])
        for wrong, said in (
            ({"patch_size": 28}, "no setting 'patch_size'"),
            ({"max_pixels": "many"}, "max_pixels must be a whole number"),
            ({"max_pixels": True}, "whole number"),
            ({"max_pixels": 10**9}, "whole number"),
            ({"size": {"width": 3}}, "no 'width'"),
            ({"size": 5}, "size must be an object"),
            ({"min_pixels": 8000, "max_pixels": 1000}, "least size is above"),
            ([1], "an object of settings"),
        ):
            with pytest.raises(MediaError, match=said):
                await item(wrong)

    with_client(use)


def test_bounds_name_the_item():
    async def use(core, client):
        with pytest.raises(MediaError, match="2 images") as caught:
            await client.media.prepare([source(A), source(B), Source("third", data=b"x")], "")
        assert caught.value.param == "third" and caught.value.code == "too_many_media"
        with pytest.raises(MediaError) as caught:
            await client.media.prepare([source(A), Source("second", data=b"no image")], "")
        assert caught.value.param == "second"
        with pytest.raises(InvalidRequest, match="2 places for images, and 1 images"):
            await client.resolve(prompt(A))

    with_client(use, limits={"image": 2})


def test_there_is_an_end_to_what_is_held():
    async def use(core, client):
        (held,) = await client.media.prepare([source(A)], "")
        with pytest.raises(MediaBusy):
            await client.media.prepare([source(B)], "")
        del held
        assert await client.media.prepare([source(B)], "")

    with_client(use, max_held_bytes=len(seeing_model.png(B)) + 10)


def test_what_two_children_died_of_is_refused_for_a_while():
    async def use(core, client):
        asked = []

        async def dies(question, owner):
            asked.append(owner)

        client.media._children.ask = dies
        for owner in ("me", "me", "other"):
            with pytest.raises(MediaError, match="too much time or memory"):
                await client.media.prepare([source(A)], owner)
        assert asked == ["me", "other"]

    with_client(use)


def test_an_item_that_cannot_be_made_again_fails_its_request():
    async def use(core, client):
        stream = await submitted(client, A, B)
        sent = await asyncio.to_thread(core.next, AddRequest)
        client.media._tensors.clear()

        async def lost(question, owner):
            raise OSError

        client.media._children.ask = lost
        core.say(MediaWanted(core.epoch, sent.id, 0))
        gone = await asyncio.to_thread(core.next, MediaGone)
        assert (gone.request_id, gone.index) == (sent.id, 0) and "OSError" not in gone.reason
        stream.cancel()

    with_client(use)


def test_models_of_text_take_no_images():
    async def use():
        with FakeCore() as core:
            async with AsyncClient(core.address) as client:
                await open_media(client)
                assert client.media is None
                with pytest.raises(InvalidRequest, match="text only"):
                    await client.resolve({"prompt": "x", "multi_modal_data": {"image": A}})

    asyncio.run(use())


def test_routers_tell_images_apart():
    ids = np.array([1, 500, 500, 2], np.int32)
    rows = []
    for digest in (b"a" * 32, b"b" * 32):
        item = MediaItem("image", digest, [(1, 2)], [])
        rows.append(routing_ids(TokenInputs(ids.tobytes(), items=[item])))
    assert rows[0][0] == 1 and rows[0][3] == 2 and (rows[0][1:3] != rows[1][1:3]).all() and (rows[0] >= 0).all()
    assert routing_ids(TokenInputs(ids.tobytes())).tolist() == ids.tolist()


def test_files_of_an_unknown_family_are_an_error():
    async def use():
        files = seeing_model.files() | {"config.json": json.dumps({"model_type": "novel"}).encode()}
        with FakeCore(files=files, limits=LIMITS) as core:
            async with AsyncClient(core.address) as client:
                with pytest.raises(ValueError, match="novel"):
                    await open_media(client)

    asyncio.run(use())


def test_patches_have_a_bound_of_their_own():
    """The processor's time grows with their square."""
    family = families.Family("t", "t", ("t",), ("max_patches",))
    assert request_options.checked({"max_patches": 256}, family) == {"max_patches": 256}
    with pytest.raises(MediaError, match="from 1 to 256"):
        request_options.checked({"max_patches": 257}, family)
