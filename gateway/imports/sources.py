"""Where models come from, besides folders of this machine: a hub and an object store that the operator has chosen.

    hf://org/name@revision    a model of the hub at STACCATO_HF_ENDPOINT; without a revision: main
    s3://bucket/prefix        the objects right below the prefix, in the store at STACCATO_S3_ENDPOINT

A source says which files it holds (`listing`), and how each file is asked for. gateway/imports/download.py reads bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode
from xml.etree import ElementTree

import msgspec
from pydantic import SecretStr

from gateway.imports.listing import Digests, Listed, Listing
from store.files.artefact import ArtefactRefused

if TYPE_CHECKING:
    from gateway.config import Settings
    from gateway.imports.download import Downloader, FetchedBody

FILES_MOST = 10_000  # files of a source: a model has fewer
LISTING_MOST = 32 << 20  # bytes
MAIN = "main"

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_REPO = re.compile(rf"{_PART}/{_PART}")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Wrong(ValueError):
    """Not a source; the message says how to write a source."""


@dataclass(frozen=True)
class Hub:
    repo: str
    revision: str = MAIN

    @property
    def place(self) -> str:
        return f"hf://{self.repo}"


@dataclass(frozen=True)
class ObjectPrefix:
    bucket: str
    prefix: str

    @property
    def place(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"


Remote = Hub | ObjectPrefix


def parse(source: str) -> Remote | None:
    """Parse a source; None: a folder. Raises Wrong."""
    scheme, found, rest = source.partition("://")
    if not found or scheme not in ("hf", "s3"):
        return None
    return _hub(rest) if scheme == "hf" else _bucket(rest)


def _hub(rest: str) -> Hub:
    repo, _, revision = rest.partition("@")
    revision = revision if "@" in rest else MAIN
    if not _REPO.fullmatch(repo) or ".." in repo or not _REVISION.fullmatch(revision) or ".." in revision:
        raise Wrong(f"hf://{rest} is no model of a hub: write hf://org/name or hf://org/name@revision")
    return Hub(repo, revision)


def _bucket(rest: str) -> ObjectPrefix:
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.rstrip("/")
    parts = prefix.split("/")
    if not _BUCKET.fullmatch(bucket) or ".." in bucket or not all(map(_is_segment, parts)) or len(prefix) > 900:
        raise Wrong(f"s3://{rest} is no folder of an object store: write s3://bucket/prefix")
    return ObjectPrefix(bucket, prefix)


def _is_segment(part: str) -> bool:
    return part not in ("", ".", "..") and part.isprintable() and "\\" not in part


@dataclass(frozen=True)
class Sources:
    """Settings about imports of models: the operator's permissions and places."""

    roots: tuple[Path, ...] = ()  # tenants register folders below these roots
    remotes: tuple[str, ...] = ()  # tenants name sources with these prefixes, as hf://org/ or s3://bucket/models/
    folder: Path = Path(".staccato/models")  # folder for fetched bytes
    bytes_most: int | None = None  # bytes in the folder
    hf_endpoint: str = "https://huggingface.co"
    hf_hosts: tuple[str, ...] = (".huggingface.co", ".hf.co")  # the hub may redirect to these hosts
    hf_token: SecretStr | None = None
    s3_endpoint: str | None = None
    s3_region: str = "us-east-1"
    s3_key_id: SecretStr | None = None
    s3_secret: SecretStr | None = None
    s3_session_token: SecretStr | None = None

    @classmethod
    def of(cls, settings: Settings) -> Sources:
        return cls(
            roots=tuple(settings.model_roots),
            remotes=settings.model_sources,
            folder=settings.models,
            bytes_most=settings.models_most,
            hf_endpoint=settings.hf_endpoint,
            hf_hosts=settings.hf_hosts,
            hf_token=settings.hf_token,
            s3_endpoint=settings.s3_endpoint,
            s3_region=settings.s3_region,
            s3_key_id=settings.s3_key_id,
            s3_secret=settings.s3_secret,
            s3_session_token=settings.s3_session_token,
        )

    def allows_tenants(self, remote: Remote) -> bool:
        """Whether tenants may import a source. Compares part by part: `hf://org` does not allow hf://organ/name."""
        place = f"{remote.place}/"
        return any(place.startswith(prefix if prefix.endswith("/") else prefix + "/") for prefix in self.remotes)

    def endpoint(self, remote: Remote) -> str:
        if isinstance(remote, Hub):
            return self.hf_endpoint.rstrip("/")
        return (self.s3_endpoint or f"https://s3.{self.s3_region}.amazonaws.com").rstrip("/")

    def hosts(self, remote: Remote) -> tuple[str, ...]:
        """Hosts allowed for redirects, besides the endpoint's host."""
        return self.hf_hosts if isinstance(remote, Hub) else ()


# ── what a source holds ───────────────────────────────────────────────────────────────────────────────────────────────


def listing(remote: Remote, revision: str | None, sources: Sources, door: Downloader) -> Listing:
    """Return the files of a source. `revision`: the commit found by an earlier run, if any.

    Raises Refused; Broken, if a later try may succeed.
    """
    if isinstance(remote, Hub):
        return _hub_listing(remote, revision or remote.revision, sources, door)
    return _bucket_listing(remote, sources, door)


def _hub_listing(hub: Hub, revision: str, sources: Sources, door: Downloader) -> Listing:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.hf_api import ModelInfo
    from huggingface_hub.utils._headers import build_hf_headers

    endpoint = sources.endpoint(hub)
    token = sources.hf_token.get_secret_value() if sources.hf_token else False
    headers = build_hf_headers(token=token, library_name="staccato")
    url = f"{endpoint}/api/models/{hub.repo}/revision/{quote(revision, safe='')}?blobs=true"
    answer = door.read(url, headers, LISTING_MOST)
    _check_hub(answer, hub, revision)
    try:
        info: Any = ModelInfo(**msgspec.json.decode(answer.body, type=dict[str, Any]))  # type: ignore[no-untyped-call]
        commit, siblings = str(info.sha), list(info.siblings or ())[: FILES_MOST + 1]
        found = [(str(s.rfilename), s.size, s.blob_id, s.lfs.sha256 if s.lfs else None) for s in siblings]
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError, KeyError, AttributeError, ValueError) as error:
        raise ArtefactRefused(
            f"{door.name} answers with something else than a model: is STACCATO_HF_ENDPOINT a hub?"
        ) from error
    if not _COMMIT.fullmatch(commit):
        raise ArtefactRefused(
            f"{door.name} names no commit for {revision!r} of {hub.repo}: give a branch, a tag or a commit"
        )

    def asked(name: str) -> Callable[[], tuple[str, dict[str, str]]]:
        return lambda: (hf_hub_url(hub.repo, name, revision=commit, endpoint=endpoint), headers)

    files = []
    for name, size, blob_id, lfs in found:
        if not isinstance(size, int) or size < 0:
            raise ArtefactRefused(f"{door.name} does not say how large {name!r} is: a hub that does is needed")
        if not (_SHA256.fullmatch(lfs or "") or _COMMIT.fullmatch(blob_id or "")):
            raise ArtefactRefused(f"{door.name} says no digest of {name!r}: a hub that does is needed")
        digests = Digests(sha256=lfs) if lfs else Digests(git_sha1=blob_id)
        files.append(Listed(name, size, digests, None, asked(name), f"{endpoint}/{hub.repo}/{commit}"))
    return Listing(commit, tuple(files))


def _check_hub(answer: FetchedBody, hub: Hub, revision: str) -> None:
    """Raises Refused for an error status of the hub, as the hub's own library reads the status."""
    from huggingface_hub import errors
    from huggingface_hub.utils._http import hf_raise_for_status

    try:
        hf_raise_for_status(answer.response)
    except errors.RevisionNotFoundError as error:
        raise ArtefactRefused(
            f"{hub.repo} has no revision {revision!r}: give a branch, a tag or a commit of it"
        ) from error
    except errors.GatedRepoError as error:
        raise ArtefactRefused(
            f"{hub.repo} is gated: accept its terms on the hub with the account whose token is STACCATO_HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ArtefactRefused(
            f"the hub shows no model {hub.repo} (status {answer.response.status_code}): correct the name, or set "
            "STACCATO_HF_TOKEN if it is private or gated"
        ) from error
    except errors.HfHubHTTPError as error:
        raise ArtefactRefused(
            f"the hub refuses to show {hub.repo} (status {answer.response.status_code}): "
            "see whether STACCATO_HF_TOKEN is right"
        ) from error


# ── an object store ───────────────────────────────────────────────────────────────────────────────────────────────────


def _bucket_listing(bucket: ObjectPrefix, sources: Sources, door: Downloader) -> Listing:
    base = f"{sources.endpoint(bucket)}/{bucket.bucket}"
    prefix, files, more = f"{bucket.prefix}/", [], ""
    while True:
        query = {"delimiter": "/", "list-type": "2", "prefix": prefix} | ({"continuation-token": more} if more else {})
        url = f"{base}?{urlencode(sorted(query.items()), quote_via=quote)}"
        answer = door.read(url, _signed(url, sources), LISTING_MOST)
        _check_bucket(answer, bucket)
        try:
            page = ElementTree.fromstring(answer.body)
            for found in page.iterfind("{*}Contents"):
                key, size, etag = (found.findtext(f"{{*}}{name}") or "" for name in ("Key", "Size", "ETag"))
                if key != prefix:
                    files.append(_object(base, prefix, key, int(size), etag, sources))
            more = page.findtext("{*}NextContinuationToken") or ""
        except (ElementTree.ParseError, ValueError) as error:
            raise ArtefactRefused(
                f"{door.name} answers with something else than a list: is STACCATO_S3_ENDPOINT an object store?"
            ) from error
        if not more or len(files) > FILES_MOST:
            break
    if not files:
        raise ArtefactRefused(f"there is nothing below {bucket.place}: correct the bucket or the prefix")
    return Listing(None, tuple(files))


def _object(base: str, prefix: str, key: str, size: int, etag: str, sources: Sources) -> Listed:
    if not key.startswith(prefix):
        raise ValueError(f"{key!r} was not asked for")
    url = f"{base}/{quote(key)}"
    plain = etag.strip('"')

    def asked() -> tuple[str, dict[str, str]]:
        return url, _signed(url, sources, {"x-amz-checksum-mode": "ENABLED"})

    md5 = plain if re.fullmatch(r"[0-9a-f]{32}", plain) else None  # a multipart object's ETag is no MD5
    return Listed(key.removeprefix(prefix), size, Digests(md5=md5), etag or None, asked, base)


def _signed(url: str, sources: Sources, headers: dict[str, str] | None = None) -> dict[str, str]:
    """Return the headers of a GET, with the store's signature if a key is set."""
    if sources.s3_key_id is None or sources.s3_secret is None:
        return dict(headers or {})
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    token = sources.s3_session_token.get_secret_value() if sources.s3_session_token else None
    keys = Credentials(sources.s3_key_id.get_secret_value(), sources.s3_secret.get_secret_value(), token)
    request = AWSRequest("GET", url, headers=dict(headers or {}))
    S3SigV4Auth(keys, "s3", sources.s3_region).add_auth(request)
    return dict(request.headers.items())


def _check_bucket(answer: FetchedBody, bucket: ObjectPrefix) -> None:
    """Raises Refused for an error status of the object store."""
    match answer.response.status_code:
        case 200:
            return
        case 401 | 403:
            raise ArtefactRefused(
                f"the object store refuses access to {bucket.place}: see STACCATO_S3_KEY_ID and its rights"
            )
        case 404:
            raise ArtefactRefused(f"there is no bucket {bucket.bucket!r} in the object store: correct the name")
        case status:
            raise ArtefactRefused(f"the object store refuses to list {bucket.place} (status {status}): see its region")
