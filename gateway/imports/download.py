"""Downloads over HTTP, only from hosts chosen by the operator: an interrupted download continues where it stopped.

The module follows redirects itself, since a redirect names a host that the operator may not have chosen. A file is read
into a partial file and hashed on the way; the hashes are compared with the source's promises.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import httpx2

from gateway.config import on_this_machine
from gateway.imports.listing import Listed
from store.files.artefact import ArtefactRefused

CHUNK = 1 << 20  # bytes
CONNECT_S, SILENCE_S = 10.0, 15.0
# A download is broken if it is slower than LEAST_BYTES_S, averaged over the window.
WINDOW_S, LEAST_BYTES_S = 30.0, 4096
REDIRECTS_MOST = 5
RETRYABLE = (408, 425, 429)


class DownloadFailed(Exception):
    """The connection or the host failed: a later try may succeed. The message is for people and names no secret."""


class Damaged(Exception):
    """The bytes differ from the source's promise."""


@dataclass(frozen=True)
class FetchedBody:
    """A small answer, whole."""

    response: httpx2.Response
    body: bytes


class Downloader:
    """The gateway's only way to hosts outside. `name` is the endpoint's name in sentences."""

    def __init__(self, endpoint: str, hosts: tuple[str, ...]) -> None:
        self._endpoint, self._hosts = urlsplit(endpoint), hosts
        self.name = self._endpoint.netloc.rpartition("@")[2]
        self._http = httpx2.Client(
            follow_redirects=False,
            timeout=httpx2.Timeout(SILENCE_S, connect=CONNECT_S),
            trust_env=not on_this_machine(endpoint),
            headers={"accept-encoding": "identity"},
        )

    def close(self) -> None:
        self._http.close()

    def read(self, url: str, headers: dict[str, str], most: int) -> FetchedBody:
        """Return a small answer with any status except statuses that ask for another try. Raises Broken, Refused."""
        with self.open(url, headers) as response:
            body = bytearray()
            for chunk in response.iter_bytes(CHUNK):
                body += chunk
                if len(body) > most:
                    raise ArtefactRefused(
                        f"{self.name} answers with more than {most} bytes: it is no list of a model's files"
                    )
        # A new Response, since the first was read piece by piece.
        kept = {name: value for name, value in response.headers.items() if name != "content-encoding"}
        whole = httpx2.Response(response.status_code, headers=kept, content=bytes(body), request=response.request)
        return FetchedBody(whole, bytes(body))

    @contextlib.contextmanager
    def open(self, url: str, headers: dict[str, str]) -> Iterator[httpx2.Response]:
        """Yield a streaming answer. Only the endpoint gets the secrets in `headers`. Raises Broken, Refused."""
        try:
            with contextlib.ExitStack() as stack:
                for _ in range(REDIRECTS_MOST + 1):
                    self._check(url)
                    said = headers if self._is_endpoint(url) else _without_secrets(headers)
                    response = stack.enter_context(self._http.stream("GET", url, headers=said))
                    if not response.has_redirect_location:
                        break
                    url = str(response.url.join(response.headers["location"]))
                    stack.close()
                else:
                    raise ArtefactRefused(f"{self.name} sends us on more than {REDIRECTS_MOST} times: see its settings")
                if response.status_code >= 500 or response.status_code in RETRYABLE:
                    raise DownloadFailed(f"{_host(url)} answers with status {response.status_code}")
                yield response
        except (httpx2.TransportError, httpx2.StreamError, httpx2.DecodingError) as error:
            raise DownloadFailed(_sentence(error, _host(url))) from error
        except (httpx2.InvalidURL, ValueError) as error:
            raise ArtefactRefused(f"{self.name} sends us to something that is no URL: see its settings") from error

    def _is_endpoint(self, url: str) -> bool:
        return _origin(url) == _origin(self._endpoint.geturl())

    def _check(self, url: str) -> None:
        """Raises Refused for a host that the operator has not chosen."""
        if self._is_endpoint(url):
            return
        parts = urlsplit(url)
        scheme, host, port = _origin(url)
        secure = scheme == "https" or scheme == "http" == self._endpoint.scheme
        default = port == (443 if scheme == "https" else 80)
        known = any(
            f"{host}:{port}" == allowed or (default and (host == allowed or _is_below(host, allowed)))
            for allowed in self._hosts
        )
        if not secure or not known or parts.username is not None:
            raise ArtefactRefused(
                f"{self.name} sends us to {scheme}://{host}:{port}, which is refused: "
                "if that is where its files are, add it to STACCATO_HF_HOSTS"
            )


def _is_below(host: str, domain: str) -> bool:
    return domain.startswith(".") and host.endswith(domain)


def _origin(url: str) -> tuple[str, str, int]:
    parts = urlsplit(url)
    return parts.scheme, (parts.hostname or "").rstrip("."), parts.port or (443 if parts.scheme == "https" else 80)


def _host(url: str) -> str:
    """Return host and port of a URL, without user and password."""
    return urlsplit(url).netloc.rpartition("@")[2]


def _without_secrets(headers: dict[str, str]) -> dict[str, str]:
    kept = ("user-agent", "range", "if-match", "if-range")
    return {name: value for name, value in headers.items() if name.lower() in kept}


def _sentence(error: Exception, host: str) -> str:
    match error:
        case httpx2.ConnectTimeout() | httpx2.ReadTimeout() | httpx2.WriteTimeout() | httpx2.PoolTimeout():
            return f"{host} does not answer in time"
        case httpx2.ConnectError():
            return f"{host} can't be reached ({_cause(error)})"
        case _:
            return f"the connection to {host} broke"


def _cause(error: BaseException) -> str:
    """Return the operating system's reason for an error, the most precise reason."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, ssl.SSLError):
            return "its certificate is not accepted"
        if isinstance(found, OSError) and found.strerror:
            return found.strerror
        found = found.__cause__ or found.__context__
    return "no connection"


# ── a file ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Hashes:
    """Hashes of the received bytes: SHA-256 and every hash that the source promised."""

    def __init__(self, file: Listed) -> None:
        self._file = file
        self.begin()

    def begin(self) -> None:
        self.sha256 = hashlib.sha256()
        self._all = [self.sha256]
        self._promised: list[tuple[str, Any, str]] = []
        promised = self._file.digests
        if promised.sha256:
            self._promised.append(("SHA-256", self.sha256, promised.sha256))
        if promised.git_sha1:
            blob = hashlib.sha1(b"blob %d\0" % self._file.size, usedforsecurity=False)
            self._all.append(blob)
            self._promised.append(("git blob", blob, promised.git_sha1))
        self._md5 = hashlib.md5(usedforsecurity=False)
        if promised.md5:
            self._all.append(self._md5)

    def update(self, chunk: bytes) -> None:
        for hash in self._all:
            hash.update(chunk)

    def hear(self, response: httpx2.Response) -> None:
        """Add promises in an object store's headers: the store's own checksum, and the ETag if it is an MD5."""
        said = response.headers.get("x-amz-checksum-sha256", "")
        whole = response.headers.get("x-amz-checksum-type", "FULL_OBJECT") == "FULL_OBJECT" and "-" not in said
        if said and whole:
            with contextlib.suppress(ValueError):
                self._promised.append(("SHA-256", self.sha256, base64.b64decode(said, validate=True).hex()))
        own_key = "x-amz-server-side-encryption-customer-algorithm" in response.headers
        plain = response.headers.get("x-amz-server-side-encryption", "AES256") == "AES256" and not own_key
        if self._file.digests.md5 and plain:
            self._promised.append(("MD5", self._md5, self._file.digests.md5))

    def check(self) -> None:
        """Compare hashes and promises. Raises Damaged."""
        for name, hash, promised in self._promised:
            if hash.hexdigest() != promised:
                raise Damaged(
                    f"{self._file.name} has the {name} digest {hash.hexdigest()[:12]}, and {promised[:12]} was promised"
                )


def download(door: Downloader, file: Listed, partial: Path, heard: Callable[[int], None]) -> str:
    """Download a file into `partial`, after the bytes already there, and return its SHA-256.

    `heard` is called with the number of bytes so far, and may raise to stop the download. Raises Broken, Damaged,
    Refused, OSError.
    """
    try:
        with partial.open("r+b") as target:
            hashes = _Hashes(file)
            here = _known(target, file, hashes, heard)
            if here < file.size:
                _fetch(door, file, target, hashes, here, heard)
            target.flush()
            os.fsync(target.fileno())
        hashes.check()
    except Damaged:
        os.truncate(partial, 0)
        raise
    return hashes.sha256.hexdigest()


def _known(target: BinaryIO, file: Listed, hashes: _Hashes, heard: Callable[[int], None]) -> int:
    """Hash the bytes of earlier runs and return their number.

    If the answer's headers are needed for a check, the last byte is dropped and asked for again.
    """
    size = os.fstat(target.fileno()).st_size
    keep = size if file.digests.sha256 or file.digests.git_sha1 else min(size, file.size - 1)
    if size > file.size or keep < 0:
        keep = 0
    target.truncate(keep)
    here = 0
    while chunk := target.read(CHUNK):
        hashes.update(chunk)
        here += len(chunk)
        heard(here)
    return here


def _fetch(
    door: Downloader, file: Listed, target: BinaryIO, hashes: _Hashes, here: int, heard: Callable[[int], None]
) -> None:
    url, headers = file.asked()
    headers = dict(headers) | ({"range": f"bytes={here}-"} if here else {})
    headers |= {"if-match": file.etag} if file.etag else {}
    with door.open(url, headers) as response:
        if not _goes_on(response, file, here):
            target.seek(0)
            target.truncate(0)
            hashes.begin()
            here = 0
        hashes.hear(response)
        since_s, before = time.monotonic(), here
        for chunk in response.iter_raw():
            here += len(chunk)
            if here > file.size:
                raise Damaged(f"{file.name} has more than the {file.size} bytes that were promised")
            target.write(chunk)
            hashes.update(chunk)
            heard(here)
            if (now_s := time.monotonic()) - since_s > WINDOW_S:
                if here - before < LEAST_BYTES_S * WINDOW_S:
                    raise DownloadFailed(
                        f"{_host(str(response.url))} is too slow: {here - before} bytes in {WINDOW_S:g} s"
                    )
                since_s, before = now_s, here
    if here < file.size:
        raise DownloadFailed(f"{file.name} ended after {here} of {file.size} bytes")


def _goes_on(response: httpx2.Response, file: Listed, here: int) -> bool:
    """Whether the body continues the bytes in the file; else the body is the whole file. Raises Broken, Refused."""
    match response.status_code:
        case 206:
            if response.headers.get("content-range", "").startswith(f"bytes {here}-"):
                return True
            raise DownloadFailed(f"{_host(str(response.url))} sends another part than was asked for")
        case 200:
            return here == 0
        case 401 | 403:
            raise ArtefactRefused(
                f"{_host(str(response.url))} refuses {file.name} (status {response.status_code}): "
                "see the token or the key in the settings"
            )
        case 404 | 410:
            raise ArtefactRefused(f"{file.name} is not there any more: import it again")
        case 412:
            raise ArtefactRefused(f"{file.name} was changed while it was read: import it again")
        case status:
            raise ArtefactRefused(
                f"{_host(str(response.url))} answers {file.name} with status {status}: see its settings"
            )
