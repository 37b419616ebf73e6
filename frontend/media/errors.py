"""Errors of media, each with the field of the request that it is about. Texts name no library, address or path."""

from typing import Self

from quire.frontend.client.stream import InvalidRequest, Overloaded


class MediaError(InvalidRequest):
    """An item cannot be used: HTTP 400. param: the field that names it. code: for programs."""

    def __init__(self, message: str, param: str = "", code: str = "invalid_media") -> None:
        super().__init__(message)
        self.param = param
        self.code = code

    def at(self, param: str) -> Self:
        """The same error about this field."""
        return type(self)(str(self), param, self.code)


class MediaBusy(Overloaded):
    """There is no room, or no process, for the item now: HTTP 503 with Retry-After."""

    retry_after_s = 2
