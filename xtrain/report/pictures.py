"""Heat maps inside a page: a matrix of values from 0 to 1 as a PNG. A value is an opacity, so the
page's background shows."""

import base64
import html
import struct
import zlib

import numpy as np

COLOR = (59, 130, 246)


def png(alpha_YX: np.ndarray) -> bytes:
    """Encode alpha (Y, X), values from 0 to 1, as a PNG with one pixel per value.

    Color type 6, 8 bits (W3C PNG).
    """
    Y, X = alpha_YX.shape
    pixels = np.empty((Y, X, 4), np.uint8)
    pixels[..., :3] = COLOR
    pixels[..., 3] = np.clip(np.nan_to_num(alpha_YX), 0, 1) * 255 + 0.5
    # Each row starts with the number of its filter; 0: none.
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    chunk = lambda kind, data: (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    )
    head = struct.pack(">IIBBBBB", X, Y, 8, 6, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows, 9))
        + chunk(b"IEND", b"")
    )


def image(alpha_YX: np.ndarray, description: str) -> str:
    """Return an <img> of a matrix with values from 0 to 1."""
    data = base64.b64encode(png(alpha_YX)).decode()
    text = html.escape(description)
    return f'<img class="map" src="data:image/png;base64,{data}" alt="{text}" title="{text}">'
