"""uvicorn with limits for what comes before a body, which an application never sees, and with an end
that clients hear of."""

import socket
from asyncio import TimerHandle, Transport
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..cli import say

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


class HttpServer(uvicorn.Server):
    """A server for an application of create_app.   drain: seconds that running answers get at the
    end"""

    def __init__(self, app: Starlette, host: str, port: int, drain: float):
        config = uvicorn.Config(
            app,
            host,
            port,
            http=LimitedProtocol,
            log_level="warning",
            server_header=False,
            # a little later than the application ends its answers
            timeout_graceful_shutdown=int(drain) + 5,
        )
        super().__init__(config)
        self.application = app.state.server
        self.drain_seconds = drain

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and print the URL."""
        await super().startup(sockets)
        if not self.started:
            return
        host = self.config.host
        if ":" in host:
            host = f"[{host}]"
        port = self.servers[0].sockets[0].getsockname()[1]
        say(f"http://{host}:{port}/v1")

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Handle SIGTERM or SIGINT: complete what is running."""
        if self.started:
            self.application.drain(self.drain_seconds)
        super().handle_exit(sig, frame)
