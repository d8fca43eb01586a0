"""uvicorn's HTTP with bounds on the head of a request (its line and headers): how large it is, and how long it takes.

Our other checks (key, size of the body, time limit) see a request only once its head is complete.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

LARGEST_HEAD = 64 << 10  # bytes of a request's line and headers, or of trailers: browsers send less than 16 KiB
LONGEST_HEAD = 60.0  # seconds until all headers are here, from the connection or the end of the answer before
TOO_LARGE = "the request line and the headers have more bytes than are taken"


class BoundedHttp(HttpToolsProtocol):
    """Counts the bytes that brought no part of a body, and the seconds of a head."""

    longest_head = LONGEST_HEAD
    _bytes = 0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._bytes += len(data)
        super().data_received(data)
        if self._bytes > LARGEST_HEAD and not self.transport.is_closing():
            self._refuse()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._deadline is None:  # another request on the same connection
            self._expect_head()

    def on_headers_complete(self) -> None:
        self._stop_clock()
        self._bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._bytes = 0
        super().on_message_complete()

    def _expect_head(self) -> None:
        self._deadline = self.loop.call_later(self.longest_head, self.transport.close)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self) -> None:
        head = b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[431] + head + TOO_LARGE.encode())
        self.transport.close()
