"""Images of a request: data URLs, decoded within limits. The server fetches nothing and reads no file for a client."""

from __future__ import annotations

import base64
import io
import re
from typing import Any, NamedTuple

from hf_paged.server.errors import RefusedRequestError, blaming

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")  # PIL's decoders of other formats may run programs, or are rarely looked at
_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,", re.IGNORECASE)
_EXPECTED = f"an image, expected a data URL (data:image/png;base64,...) of a {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"


class ImageLimits(NamedTuple):
    """The most that the images of one request may have together; 0 ``images``: none are read."""

    images: int = 16
    image_bytes: int = 32 << 20  # of the encoded files
    image_pixels: int = 64 << 20


class ImageReader:
    """The reader of one request's images."""

    def __init__(self, limits: ImageLimits) -> None:
        self._left = limits
        self._limits = limits

    def read(self, url: Any, detail: Any = None) -> Any:
        """Return a decoded image of PIL, by which transformers' processors take it.

        Raises:
            RefusedRequestError: it is no image, or the request's images are over a limit; the file is decoded only if
                its header says that it is within the limits.
        """
        from PIL import Image

        if detail not in (None, "auto"):
            raise RefusedRequestError(f"messages: detail={detail!r:.80} of an image, expected 'auto': the model's "
                                      "processor decides about sizes")
        if not isinstance(url, str) or (head := _DATA_URL.match(url)) is None:
            raise RefusedRequestError(f"messages: {url!r:.80} as {_EXPECTED}: the server fetches no URLs and reads no "
                                      "files")
        self._take("images", 1, "images")
        self._take("image_bytes", (len(url) - head.end()) * 3 // 4, "bytes in its images")
        with blaming(f"messages: {_EXPECTED}"):
            file = io.BytesIO(base64.b64decode("".join(url[head.end() :].split()), validate=True))
            image = Image.open(file, formats=FORMATS)
            self._take("image_pixels", image.width * image.height, "pixels in its images")
            image.load()
        return image

    def _take(self, name: str, count: int, what: str) -> None:
        left = getattr(self._left, name) - count
        if left < 0:
            most = getattr(self._limits, name)
            raise RefusedRequestError(f"messages: the request has {most - left:,} or more {what}, expected at most "
                                      f"{most:,}")
        self._left = self._left._replace(**{name: left})
