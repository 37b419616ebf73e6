"""What a frontend sends: that nothing which has come meanwhile goes unnoticed."""

import asyncio

import pytest
import zmq

from quire.ipc.links.outgoing import Outgoing


class FullSocket:
    """Nothing can be sent, and an answer waits. Whoever asks for its events has taken the descriptor's edge."""

    closed = False

    def getsockopt(self, option: int) -> int:
        assert option == zmq.EVENTS
        return zmq.POLLIN

    def send_multipart(self, frames: list[bytes], flags: int) -> None:
        raise zmq.Again


@pytest.mark.parametrize("holds", [False, True])
def test_what_came_is_looked_at_when_there_is_no_room_to_send(holds):
    async def main():
        looked, failures = asyncio.Event(), []
        outgoing = Outgoing(FullSocket(), looked.set, failures.append)
        if holds:
            outgoing.hold()
        assert not outgoing.send(b"message") and not looked.is_set()
        await asyncio.wait_for(looked.wait(), 20)
        assert not failures

    asyncio.run(main())
