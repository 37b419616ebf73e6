"""Items of prompts in the core: hashes, rows of the encoder cache, bytes on their way; all owners are checked."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from quire.enginecore.kv.pool import BlockHasher
from quire.enginecore.media.encoder_cache import EncoderCache
from quire.enginecore.media.item_bytes import ItemBytes
from quire.enginecore.media.prompt_items import PromptItems, problem_with
from quire.ipc.messages.media import MediaInfo, MediaItem, MediaTensor
from quire.ipc.step.items import ItemPiece, Run, decode_piece, decode_runs, encode_piece, encode_runs

SIZE = 4  # tokens of a block


def item(begin, length, number=0, num_bytes=10, **more):
    tensor = MediaTensor("pixel_values", "uint8", [num_bytes])
    return MediaItem("image", bytes([number]) * 32, [(begin, length)], [tensor], **more)


def hashes(ids, *items):
    hasher.extend(chain := [], b"root", np.asarray(ids, np.int32), items=PromptItems(items) if items else None)
    return chain


hasher = BlockHasher(SIZE)


def test_blocks_are_equal_if_their_items_are():
    ids = [1] * 6 + [9] * 4 + [2] * 6
    plain, one, other = hashes(ids), hashes(ids, item(6, 4)), hashes(ids, item(6, 4, 1))
    assert plain[0] == one[0] == other[0]  # the item begins in the second block
    assert len({plain[1], one[1], other[1]}) == 3 and one == hashes(ids, item(6, 4))
    longer = [9] * 12
    assert hashes(longer, item(0, 12))[1:] != hashes(longer, item(4, 8))[1:]  # another part of the same item


def test_hashes_are_copied_up_to_the_first_item_alone():
    ids = np.asarray([1] * 36 + [9] * 4 + [2] * 40, np.int32)
    fresh = BlockHasher(SIZE)
    fresh.begin(first := [], b"root", ids, items=PromptItems([item(36, 4, 1)]))
    fresh.extend(first, b"root", ids, items=PromptItems([item(36, 4, 1)]))
    fresh.begin(second := [], b"root", ids, items=PromptItems([item(36, 4, 2)]))
    assert second == first[:9]
    fresh.extend(second, b"root", ids, items=PromptItems([item(36, 4, 2)]))
    assert second[8] == first[8] and second[9] != first[9]


def test_rotary_positions_run_along_the_prompt():
    grid = [[0] * 6, [0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]]
    items = PromptItems([item(2, 6, positions=grid, advance=3), item(9, 6, 1, positions=grid, advance=3)])
    found = items.positions(0, 17)
    assert found[1].tolist() == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 6, 6, 7, 7, 7, 9, 10]
    assert found[0].tolist() == [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6, 6, 6, 6, 6, 9, 10]
    assert items.delta == -6
    for begin in range(17):
        assert np.array_equal(items.positions(begin, 17), found[:, begin:])


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ([item(2, 4), item(5, 2)], "overlap"),
        ([item(1, 4)], "placeholder alone"),
        ([item(2, 7)], "in order"),
        ([item(2, 4, positions=[[0]])], "all of its tokens"),
        ([item(2, 4, positions=[[0] * 4] * 3, advance=9)], "out of range"),
        ([item(2, 4, num_bytes=0)], "1 byte"),
        ([MediaItem("sound", bytes(32), [(2, 4)], [])], "does not take 'sound'"),
        ([MediaItem("image", bytes(3), [(2, 4)], [])], "digest"),
    ],
)
def test_what_is_wrong_is_said(items, said):
    prompt = np.asarray([1, 1, 9, 9, 9, 9, 1, 1], np.int32)
    assert said in problem_with(items, prompt, MediaInfo(["image"], 100), 64)
    assert problem_with([item(2, 4)], prompt, MediaInfo(["image"], 100), 64) is None


def test_rows_are_kept_while_they_are_read():
    cache = EncoderCache(8)
    assert sorted(cache.allocate(b"a", 5, step=1).tolist()) == [0, 1, 2, 3, 4]
    assert cache.allocate(b"b", 4, step=1) is None  # step 1 has not returned
    cache.returned = 1
    cache.read(b"a", 2, holder="s", is_last=False)
    cache.returned = 2
    assert cache.allocate(b"b", 4, step=3) is None  # the sequence reads more of it
    cache.let_go("s")
    assert cache.allocate(b"b", 4, step=3) is not None and cache.find(b"a") is None
    cache.check()
    cache.forget_all()
    cache.check()


def test_random_events_lose_no_row():
    draw, cache = random.Random(1), EncoderCache(40)
    for step in range(1, 4000):
        digest, holder = bytes([draw.randrange(12)]), draw.randrange(4)
        if cache.find(digest) is None:
            rows = cache.allocate(digest, 1 + digest[0], step)
            assert rows is None or len(set(rows.tolist())) == 1 + digest[0]
        elif draw.random() < 0.7:
            cache.read(digest, step, holder, draw.random() < 0.6)
        else:
            cache.let_go(holder)
        cache.returned = max(cache.returned, step - draw.randrange(5))
        if draw.random() < 0.002:
            cache.forget_all()
        cache.check()


@dataclass(eq=False)
class Asker:
    order: Any
    slot: int = -1
    is_finished: bool = False
    owner: int = 0
    request_id: int = 0


def sent(bytes_):
    return [(piece.number, piece.offset, bytes(piece.data)) for piece in bytes_.pieces()]


def test_an_item_is_asked_for_once_and_sent_in_pieces(monkeypatch):
    monkeypatch.setattr("quire.enginecore.media.item_bytes.PIECE_BYTES", 4)
    found = ItemBytes(100)
    first, second = Asker((0, 1)), Asker((0, 2))
    wanted = item(0, 1)
    assert found.want(first, 0, wanted, 0.0) and found.want(second, 3, wanted, 0.0)
    assert [tuple(q) for q in found.questions] == [(0, 0, 0)]
    assert found.take(7, wanted.digest, [b"0123456789"]) is None  # of a frontend that was not asked
    assert not list(found.pieces())
    assert found.take(0, wanted.digest, [b"12345"]) is not None  # too short
    assert found.take(0, wanted.digest, [b"0123456789"]) is None
    pieces = found.pieces()
    assert bytes(next(pieces).data) == b"0123"
    pieces = found.pieces()  # the first was not sent
    assert [bytes(piece.data) for piece in pieces] == [b"0123", b"4567", b"89"]
    assert found.find(wanted.digest).is_ready and found.changed == [wanted.digest]
    found.encoded(wanted.digest)
    assert not found.num_bytes and not len(found)
    found.check()


def test_room_goes_to_those_that_run_and_to_the_first():
    found = ItemBytes(20)
    late, early, runs = Asker((0, 9)), Asker((0, 1)), Asker((0, 5), slot=0)
    assert found.want(late, 0, item(0, 1, 1), 0.0) and found.want(late, 1, item(2, 1, 2), 0.0)
    assert not found.want(Asker((0, 10)), 0, item(0, 1, 3), 0.0)
    assert found.want(early, 0, item(0, 1, 4), 0.0) and found.num_bytes == 20
    assert found.want(runs, 0, item(0, 1, 5), 0.0) and found.want(runs, 1, item(0, 1, 6), 0.0)
    assert found.find(bytes([4]) * 32) is None  # a sequence that waits gives way to one that runs, though it came first
    found.check()
    assert found.want(runs, 2, item(0, 1, 7, num_bytes=99), 0.0) is False  # its own items have the room
    found.give_up(bytes([5]) * 32)
    found.give_up(bytes([6]) * 32)
    assert found.want(runs, 2, item(0, 1, 7, num_bytes=99), 0.0)  # alone, it may be larger
    found.check()


def test_an_ended_request_is_asked_no_more():
    found = ItemBytes(20)
    ended, other = Asker((0, 1), owner=1), Asker((0, 2), owner=2)
    found.want(ended, 0, item(0, 1), 0.0)
    found.want(other, 4, item(0, 1), 0.0)
    found.questions.clear()
    ended.is_finished = True
    found.drop_ended()
    assert [tuple(q) for q in found.questions] == [(2, 0, 4)]
    other.is_finished = True
    found.drop_ended()
    assert not len(found) and not found.num_bytes


def test_pieces_and_runs_travel():
    data = np.arange(11, dtype=np.uint8)
    for part in (data, data[:8], data[:0]):
        words = np.concatenate([x.reshape(-1) for x in encode_piece(ItemPiece(7, 0, part, item(3, 2)))])
        back = decode_piece(words)
        assert (back.number, back.offset, back.item) == (7, 0, item(3, 2)) and np.array_equal(back.data, part)
    runs = [Run(3, np.asarray([5, 1], np.int32)), Run(4, np.asarray([2], np.int32))]
    assert [(n, rows.tolist()) for n, rows in decode_runs(encode_runs(runs))] == [(3, [5, 1]), (4, [2])]


def test_spans_that_go_together():
    items = [item(2, 4), MediaItem("image", bytes(32), [(8, 3), (11, 2), (15, 1)], [])]
    plain, whole = PromptItems(items), PromptItems(items, are_whole=True)
    own = {token: span for span in ((2, 6), (8, 11), (11, 13), (15, 16)) for token in range(*span)}
    assert [whole.whole_span(token) for token in range(20)] == [own.get(token, (token, token + 1)) for token in range(20)]
    last = [own[token][1] - 1 if token in own else 0 for token in range(20)]
    for begin in range(20):
        assert plain.whole_span(begin) == (begin, begin + 1)
        for end in range(begin + 1, 21):
            assert whole.last_visible(begin, end).tolist() == last[begin:end]
            assert not plain.last_visible(begin, end).any()


def test_a_span_that_no_step_holds_is_refused():
    prompt = np.asarray([1, 1, 9, 9, 9, 9, 1, 9], np.int32)
    items = [MediaItem("image", bytes(32), [(2, 4), (7, 1)], [MediaTensor("pixel_values", "uint8", [10])])]
    assert problem_with(items, prompt, MediaInfo(["image"], 100, 4), 64) is None
    assert "4 tokens that one step computes together" in problem_with(items, prompt, MediaInfo(["image"], 100, 3), 64)
