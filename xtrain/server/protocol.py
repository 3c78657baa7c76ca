"""uvicorn's HTTP protocol with limits for what comes before a body, which an application never
sees."""

from asyncio import TimerHandle, Transport
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 1 << 16  # of the request line and the headers
HEAD_SECONDS = 20  # until they have arrived
REFUSAL = b'{"error":{"message":"the headers are longer than 65536 bytes: send shorter ones",' \
    b'"type":"invalid_request_error","param":null,"code":null}}'  # fmt: skip


class LimitedProtocol(HttpToolsProtocol):
    """Closes a connection whose headers are too long, or do not arrive."""

    head_bytes: int | None = None  # of the request that is arriving; None: it has its headers
    timer: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._expect_head()

    def on_message_begin(self) -> None:
        """Wait for the headers of a request."""
        super().on_message_begin()
        self._expect_head()

    def on_headers_complete(self) -> None:
        """End the limits."""
        self._forget_head()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the limits."""
        self._forget_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse data, and close the connection if there are too many."""
        super().data_received(data)
        if self.head_bytes is None:
            return
        self.head_bytes += len(data)
        if self.head_bytes > HEAD_BYTES:
            self._forget_head()
            head = f"HTTP/1.1 431 \r\nConnection: close\r\nContent-Length: {len(REFUSAL)}\r\n\r\n"
            self.transport.write(head.encode() + REFUSAL)
            self.transport.close()

    def _expect_head(self) -> None:
        self._forget_head()
        self.head_bytes = 0
        close: Any = self.transport.close
        self.timer = self.loop.call_later(HEAD_SECONDS, close)

    def _forget_head(self) -> None:
        self.head_bytes = None
        if self.timer is not None:
            self.timer.cancel()
