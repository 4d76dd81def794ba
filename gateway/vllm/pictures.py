"""Pictures of chats: the part of vLLM that turns the address of a picture into the picture, within Staccato's bounds.

vLLM asks a connector for each picture of a chat. vLLM's own connector fetches any address from the gateway, internal
addresses too, and opens files of any size in pixels. The connector of this file takes pictures that are in the request
itself, as `data:` URLs, in formats that browsers show.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from io import BytesIO
from typing import Any

import pybase64
from PIL import Image
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector
from vllm.multimodal.media.connector import global_thread_pool
from vllm.multimodal.media.image import ImageMediaIO

from runtime.engine.settings import CONNECTOR
from store.bus import TooLarge

PIXELS_MOST = 16_777_216  # of a picture: opened, 16 Mi pixels take 48 MiB of memory
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
INSIDE = "send the picture itself, as data:image/png;base64,…"


@MEDIA_CONNECTOR_REGISTRY.register(CONNECTOR)
class PictureConnector(MediaConnector):
    """Opens pictures that are in the request. vLLM makes a connector for each request with pictures."""

    def load_from_url(self, url: str, media_io: Any, *, fetch_timeout: int | None = None) -> Any:
        """Return the picture at a `data:` URL. Raises VLLMValidationError, which vLLM answers with status 400."""
        if not isinstance(media_io, ImageMediaIO):
            raise VLLMValidationError("of media, only pictures are taken: leave audio and video out")
        data = _inside(url)
        _check(data)
        try:
            return media_io.load_bytes(data)
        except (ValueError, OSError, SyntaxError) as error:  # Pillow's errors of damaged files
            raise VLLMValidationError(f"a picture can't be read: {error}") from error

    async def load_from_url_async(self, url: str, media_io: Any, *, fetch_timeout: int | None = None) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(global_thread_pool, self.load_from_url, url, media_io)


def too_large(error: TooLarge, pictures: int) -> str:
    """Return the sentence for a client whose request does not fit into a message of the bus.

    `pictures`: the number of pictures in the request. A prepared picture is larger than the file that the client sent.
    """
    if not pictures:
        return str(error)
    return (
        f"the request has {error.size} bytes with its pictures ({pictures}) prepared for the model, and at most "
        f"{error.most} are carried: send fewer or smaller pictures"
    )


def of_tenant(features: list[MultiModalFeatureSpec], salt: str) -> list[MultiModalFeatureSpec]:
    """Return a request's pictures under names that no other tenant's pictures have.

    An engine keeps what a picture was encoded to under the picture's name, and finds prefixes by the name. The name is
    a hash of the picture, or any text that the client chose: without the tenant's salt in the name, a client could have
    another tenant's picture described.
    """
    return [replace(feature, identifier=_salted(feature.identifier, salt)) for feature in features]


def _salted(name: str, salt: str) -> str:
    return hashlib.sha256(f"{salt} {name}".encode()).hexdigest()


def _inside(url: str) -> bytes:
    """Return the bytes of a `data:` URL. Raises VLLMValidationError."""
    if url[:5].lower() != "data:":
        scheme = url.partition(":")[0][:16]
        raise VLLMValidationError(f"a picture is given as {scheme!r} address, and no address is fetched: {INSIDE}")
    kind, comma, data = url[5:].partition(",")
    if not comma or not kind.lower().endswith(";base64"):
        raise VLLMValidationError(f"a picture's data: URL is not in base64: {INSIDE}")
    try:
        return pybase64.b64decode(data, validate=True)
    except ValueError as error:
        raise VLLMValidationError(f"a picture's base64 can't be read: {INSIDE}") from error


def _check(data: bytes) -> None:
    """Refuse a picture by its header, before a pixel is decoded. Raises VLLMValidationError."""
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as picture:
            width, height = picture.size
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise VLLMValidationError(f"a picture is none of {', '.join(FORMATS)}, or is damaged: {error}") from error
    if width * height > PIXELS_MOST:
        raise VLLMValidationError(
            f"a picture has {width} x {height} pixels, at most {PIXELS_MOST} are taken: send it smaller"
        )
