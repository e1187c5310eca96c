"""Images of a request: data URLs, decoded within limits. The server fetches nothing and reads no file for a client."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from hf_paged.server.errors import RefusedRequestError, blaming

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")  # PIL's decoders of other formats may run programs, or are rarely looked at
# Some processors resize the shorter side of an image, so that a thin one of few pixels would get too many.
MOST_RATIO = 200
# Options of image processors that change numbers, and not how many there are.
_OF_VALUES = frozenset({"image_mean", "image_std", "rescale_factor", "resample"})
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
            if max(image.size) > MOST_RATIO * min(image.size):
                raise RefusedRequestError(f"messages: an image of {image.width:,} x {image.height:,} pixels, expected "
                                          f"at most {MOST_RATIO} times as many on one side as on the other")
            image.load()
        return image

    def _take(self, name: str, count: int, what: str) -> None:
        left = getattr(self._left, name) - count
        if left < 0:
            most = getattr(self._limits, name)
            raise RefusedRequestError(f"messages: the request has {most - left:,} or more {what}, expected at most "
                                      f"{most:,}")
        self._left = self._left._replace(**{name: left})


def check_option(processor: Any, name: str, value: Any) -> None:
    """Raise RefusedRequestError for an option with which a processor would make more of an image than by its own
    settings, or elsewhere: limits are about images as they come."""
    own = getattr(processor.image_processor, name, None)
    if value is not None and name not in _OF_VALUES and (name == "device" or not _is_within(value, own)):
        expected = "it left out" if name == "device" or own is None else f"at most the processor's own {own!r:.200}"
        raise RefusedRequestError(f"chat_template_kwargs: {name}={value!r:.200}, expected {expected}")


def _is_within(value: Any, own: Any) -> bool:
    """Return whether no number in a value of an option is above that of a processor's own."""
    if isinstance(value, Mapping):
        return hasattr(own, "get") and all(_is_within(one, own.get(key)) for key, one in value.items())
    if isinstance(value, list):
        return isinstance(own, (list, tuple)) and len(value) == len(own) and all(map(_is_within, value, own))
    if value is None or isinstance(value, (bool, str)):
        return True
    return isinstance(own, (int, float)) and 0 < value <= own
