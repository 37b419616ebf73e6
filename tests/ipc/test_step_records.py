"""Masks and control requests as records: what comes back, how masks are split, what cannot be read."""

import msgspec
import numpy as np
import pytest

from quire.ipc.messages.workers import MAX_CONTROL_BYTES, ControlReply, ControlRequest, DumpStacks
from quire.ipc.step import control
from quire.ipc.step.control import decode_control, encode_control
from quire.ipc.step.masks import MASK_RECORD_WORDS, decode_masks, mask_names, mask_records, no_masks_record, rows_and_places
from quire.ipc.step.sections import MASK


def joined(parts) -> np.ndarray:
    return np.concatenate([part.reshape(-1) for part in parts])


@pytest.mark.parametrize("max_words,records", [(10_000, 1), (MASK.width + 2 * 6, 4), (MASK.width + 6, 7)])
def test_masks_come_back_from_as_many_records_as_the_limit_asks(max_words, records):
    rows = np.asarray([5, 0, 9, 3, 2, 8, 7], np.int32)
    masks = np.arange(7 * 5, dtype=np.int32).reshape(7, 5)
    written = [joined(parts) for parts in mask_records(2**31 + 3, rows, masks, max_words)]
    assert len(written) == records and max(map(len, written)) <= max_words
    read = [decode_masks(words) for words in written]
    assert {r.step for r in read} == {3}
    assert np.concatenate([r.rows for r in read]).tolist() == rows.tolist()
    assert np.concatenate([r.masks for r in read]).tolist() == masks.tolist()


def test_no_record_of_masks_is_longer_than_a_buffer():
    rows = np.arange(700, dtype=np.int32)
    masks = np.zeros((700, 4748), np.int32)
    lengths = [sum(part.size for part in parts) for parts in mask_records(1, rows, masks, 1 << 30)]
    assert len(lengths) == 4 and max(lengths) <= MASK_RECORD_WORDS


def test_rows_without_mask_are_said():
    read = decode_masks(joined(no_masks_record(4, np.asarray([6, 1], np.int32))))
    assert (read.step, read.rows.tolist(), read.masks) == (4, [6, 1], None)


def test_a_mask_that_never_fits_is_refused():
    with pytest.raises(ValueError, match="does not fit"):
        list(mask_records(1, np.zeros(1, np.int32), np.zeros((1, 100), np.int32), 50))


@pytest.mark.parametrize("request_id", [1, 200, 70_000, 2**40])  # of several lengths
def test_a_control_request_comes_back(request_id):
    words = encode_control(DumpStacks(request_id))
    assert words.dtype == np.int32
    assert decode_control(words) == DumpStacks(request_id)
    assert isinstance(decode_control(words), ControlRequest)


def test_a_control_record_is_of_bounded_size(monkeypatch):
    monkeypatch.setattr(control, "_encode", lambda request: bytes(MAX_CONTROL_BYTES + 1))
    with pytest.raises(ValueError, match="at most"):
        encode_control(DumpStacks(1))


@pytest.mark.parametrize(
    "words",
    [[-1], [1], [100, 0], [2**31 - 1, 0], [4, 0], [0], [2, 0x7F_7F_7F_7F]],
    ids=["negative", "empty", "too long", "huge", "no array", "nothing", "no union"],
)
def test_a_control_record_that_cannot_be_read_is_a_value_error(words):
    with pytest.raises(ValueError, match="control record"):
        decode_control(np.asarray(words, np.int32))


def test_a_reply_is_a_worker_message():
    from quire.ipc.messages.workers import WorkerMessage

    reply = ControlReply(1, 5, "", b"text")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(reply), type=WorkerMessage) == reply


@pytest.mark.parametrize("at_once", [3, 4, 7])
def test_the_masks_of_a_rows_window_are_in_one_record(at_once):
    rows, places = np.asarray([[5, 2, 2, 2, 0, 0, 9, 9, 9], [0, 0, 1, 2, 1, 2, 0, 1, 2]], np.int32)
    masks = np.arange(18, dtype=np.int32).reshape(9, 2)
    records = [joined(parts) for parts in mask_records(1, mask_names(rows, places), masks, 3 + 3 * at_once, windows=True)]
    come = [decode_masks(words) for words in records]
    assert np.concatenate([record.masks for record in come]).tolist() == masks.tolist()
    of_records = [set(rows_and_places(record.rows)[0].tolist()) for record in come]
    assert sum(map(len, of_records)) == 4 and max(len(record.rows) for record in come) <= at_once
    with pytest.raises(ValueError, match="masks of a row's window do not fit"):
        list(mask_records(1, mask_names(rows, places), masks, 3 + 3 * 2, windows=True))
