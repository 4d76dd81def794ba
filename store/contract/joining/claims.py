"""JSON Web Tokens of NATS' authorization callout: the server's request, the answer, and the user within the answer.

Pure. A token is `header.claims.signature`, each part in base64url without padding. The algorithm `ed25519-nkey` is
unknown to libraries of JWT, and signs with an nkey, so a function that signs or checks is an argument here.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec

from store.contract.grants import ANSWER_MINUTES, ANSWERS_MOST, User

ALGORITHM = "ed25519-nkey"
AUDIENCE = "nats-authorization-request"  # reader named by a server's requests
GLOBAL_ACCOUNT = "$G"  # account of users that the configuration gives no account
CLAIMS_VERSION = 2
NO_LIMIT = -1
REQUEST_BYTES_MOST = 64 << 10  # a request has some 2 kB

Sign = Callable[[bytes], bytes]
Verify = Callable[[str, bytes, bytes], bool]  # public key, data, signature
T = TypeVar("T")


class ClaimsError(Exception):
    """Error of a token that is malformed or badly signed; the message shows nothing of the token."""


class AskingServer(msgspec.Struct, frozen=True):
    """nats-server that asks; the id is the server's public key."""

    id: str


class ClientInfo(msgspec.Struct, frozen=True):
    """Connection of a client: the number at the server, the address, and the nonce that the server gave the client."""

    id: int = 0
    host: str = ""
    nonce: str = ""


class ConnectOptions(msgspec.Struct, frozen=True):
    """Fields of the client's CONNECT. Signature and token are secrets: neither is logged."""

    nkey: str = ""
    sig: str = ""
    auth_token: str = ""
    name: str = ""


class LoginQuestion(msgspec.Struct, frozen=True):
    """Question of a server about a client that connects. `user_nkey` names the client in the answer."""

    server_id: AskingServer
    user_nkey: str
    client_info: ClientInfo
    connect_opts: ConnectOptions


class _QuestionClaims(msgspec.Struct, frozen=True):
    iss: str
    nats: LoginQuestion
    aud: str = ""


class _Header(msgspec.Struct, frozen=True):
    typ: str
    alg: str


def question(token: bytes, verify: Verify) -> LoginQuestion:
    """Return the question of a server, whose signature is checked. Raises ClaimsError."""
    if len(token) > REQUEST_BYTES_MOST:
        raise ClaimsError(f"a request of {len(token)} bytes: at most {REQUEST_BYTES_MOST} are read")
    claims = decoded(token, verify, _QuestionClaims, lambda found: found.iss)
    if claims.aud != AUDIENCE or claims.nats.server_id.id != claims.iss:
        raise ClaimsError("the request is for a different reader, or signed by a server other than the named server")
    return claims.nats


def decoded(token: bytes, verify: Verify, kind: type[T], issuer: Callable[[T], str]) -> T:
    """Return the claims of a token as `kind`, after a check of the signature by the issuer. Raises ClaimsError."""
    signed, _, signature = token.rpartition(b".")
    header, dot, claims = signed.partition(b".")
    try:
        algorithm = msgspec.json.decode(_bytes(header), type=_Header).alg
        found = msgspec.json.decode(_bytes(claims), type=kind)
        raw = _bytes(signature)
    except (msgspec.DecodeError, binascii.Error, ValueError) as error:
        raise ClaimsError("the token is malformed") from error
    if not dot or algorithm != ALGORITHM:
        raise ClaimsError(f"the token is not signed by {ALGORITHM}")
    if not verify(issuer(found), signed, raw):
        raise ClaimsError("the signature of the token is wrong")
    return found


def admitted(asked: LoginQuestion, user: User, name: str, issuer: str, sign: Sign, now_s: int) -> bytes:
    """Return the answer that lets the client in, with the rights of `user`.

    Args:
        name: by which the server lists the connection.
        issuer: public key of the account whose key signs, as in the server's configuration.
        now_s: UNIX seconds."""
    rights: dict[str, object] = {
        "pub": {"allow": user.publishes},
        "sub": {"allow": user.subscribes},
        "subs": NO_LIMIT,
        "data": NO_LIMIT,
        "payload": NO_LIMIT,
        "type": "user",
        "version": CLAIMS_VERSION,
    }
    if user.answers:
        rights["resp"] = {"max": ANSWERS_MOST, "ttl": ANSWER_MINUTES * 60 * 10**9}  # nanoseconds
    claims = {"aud": GLOBAL_ACCOUNT, "name": name, "sub": asked.user_nkey, "nats": rights}
    return _answer(asked, {"jwt": signed(claims, issuer, sign, now_s)}, issuer, sign, now_s)


def refused(asked: LoginQuestion, issuer: str, sign: Sign, now_s: int) -> bytes:
    """Return the answer that keeps the client out. The client hears no reason; the log of the service has the reason.

    The arguments are as in `admitted`."""
    return _answer(asked, {"error": "not admitted"}, issuer, sign, now_s)


def _answer(asked: LoginQuestion, said: dict[str, str], issuer: str, sign: Sign, now_s: int) -> bytes:
    nats = {**said, "type": "authorization_response", "version": CLAIMS_VERSION}
    claims = {"aud": asked.server_id.id, "sub": asked.user_nkey, "nats": nats}
    return signed(claims, issuer, sign, now_s).encode()


def signed(claims: Mapping[str, object], issuer: str, sign: Sign, now_s: int) -> str:
    """Return a token with the claims, signed by the issuer at `now_s` UNIX seconds."""
    whole = {**claims, "iss": issuer, "iat": now_s}
    digest = hashlib.sha256(_json(whole)).digest()
    whole["jti"] = base64.b32encode(digest).decode().rstrip("=")
    body = f"{_text(_json({'typ': 'JWT', 'alg': ALGORITHM}))}.{_text(_json(whole))}"
    return f"{body}.{_text(sign(body.encode()))}"


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _bytes(text: bytes) -> bytes:
    return base64.b64decode(text + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)


def signature(said: str) -> bytes:
    """Return the bytes of a client's signature in CONNECT, in either alphabet of base64; empty if malformed."""
    try:
        return _bytes(said.rstrip("=").replace("+", "-").replace("/", "_").encode())
    except (binascii.Error, ValueError):
        return b""
