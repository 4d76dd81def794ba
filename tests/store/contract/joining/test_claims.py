"""JSON Web Tokens of NATS' authorization callout, with a question that a real nats-server 2.15.1 asked."""

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.contract import grants
from store.contract.joining import claims
from store.contract.joining.claims import ClaimsError, LoginQuestion, admitted, decoded, question, refused
from store.keypairs import SigningKey, new_seed, verified

# A runtime r1 with this key and a made-up token asked to come in.
KEY = "UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4"
QUESTION = (
    "eyJ0eXAiOiJKV1QiLCJhbGciOiJlZDI1NTE5LW5rZXkifQ.eyJhdWQiOiJuYXRzLWF1dGhvcml6YXRpb24tcmVxdWVzdCIsImV4cCI6MTc5NTc"
    "5MzMyOSwianRpIjoiRllPTlZXVUVLNFE3UkJSWTdWWVJYS05ZR05RM0NOTU1GR1pLSlZITUhHTjdZVDJGTzZEUSIsImlhdCI6MTc5NTc5MzMyN"
    "ywiaXNzIjoiTkM2S1Q0RElGRDI2WVVVRklDM0VESzdPSk5JR0Q1NkwyVzZXQU9JVTVNSlo1WUNUQTdHWVEyU0UiLCJzdWIiOiJBRDRITkxNR1d"
    "ZNE5IRUY1RjJKTUtBUDJCVk8yVlBaN0ZMN1hQTTVLTkJYSEpBUE5ENU1MNFZJUCIsIm5hdHMiOnsic2VydmVyX2lkIjp7Im5hbWUiOiJOQzZLV"
    "DRESUZEMjZZVVVGSUMzRURLN09KTklHRDU2TDJXNldBT0lVNU1KWjVZQ1RBN0dZUTJTRSIsImhvc3QiOiIxMjcuMC4wLjEiLCJpZCI6Ik5DNkt"
    "UNERJRkQyNllVVUZJQzNFREs3T0pOSUdENTZMMlc2V0FPSVU1TUpaNVlDVEE3R1lRMlNFIiwidmVyc2lvbiI6IjIuMTUuMSJ9LCJ1c2VyX25rZ"
    "XkiOiJVREdGN0lIT0tMWVZSSFNPRElSTUpVN1pCRVZUQUlXV0IyV1BZTlk1VE1ERkFLRlFMS0w3R1BLWiIsImNsaWVudF9pbmZvIjp7Imhvc3Q"
    "iOiIxMjcuMC4wLjEiLCJpZCI6NywidXNlciI6IlVEWFU0UkNTSk5aT0lRSFpOV1hIWE9SRFBSVEdOSkFIQUhGUkdaTkVFSkNQUVRUMk03TkxDT"
    "kY0IiwibmFtZSI6InJ1bnRpbWUtcjEiLCJraW5kIjoiQ2xpZW50IiwidHlwZSI6Im5hdHMiLCJub25jZSI6InJqS3BfajVjYzJtRWZObyJ9LCJ"
    "jb25uZWN0X29wdHMiOnsibmtleSI6IlVEWFU0UkNTSk5aT0lRSFpOV1hIWE9SRFBSVEdOSkFIQUhGUkdaTkVFSkNQUVRUMk03TkxDTkY0Iiwic"
    "2lnIjoieFFjNUo4YWZkeURBaXVYRk9TR2Z4b1NsTzRUQlpCSVJPTFQ5U2VFTHdpRkFGYWZySHFld0RzRHJLOEQ5aW9ocE1sakRvSUZmMTRaTlR"
    "KRXd2eTlKQlE9PSIsImF1dGhfdG9rZW4iOiJzdC1qb2luLTExMTExMTExMTExMTExMTExMTExMTExMTExMTExMTExLTIyMjIyMjIyMjIyMjIyM"
    "jIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMjIyMiIsIm5hbWUiOiJydW50aW1lLXIxIiwibGFuZyI6InB5dGhvbjMiLCJ2ZXJzaW9uIjo"
    "iMi4xNi4wIiwicHJvdG9jb2wiOjF9LCJ0eXBlIjoiYXV0aG9yaXphdGlvbl9yZXF1ZXN0IiwidmVyc2lvbiI6Mn19.XSvCNuJaDQv4G8MzhA01"
    "KFFLDiw12G6uRWnwz6ZEDKAAzIq81g7AJqsnzfVYOZ3jEU-OsLtsoKxC9-jnj9XZCA"
)
ISSUER = SigningKey(new_seed("account"))


class _AnyClaims(msgspec.Struct):
    iss: str
    sub: str
    nats: dict[str, Any]
    aud: str = ""
    name: str = ""
    iat: int = 0


def asked() -> LoginQuestion:
    return question(QUESTION.encode(), verified)


def read(token: bytes) -> _AnyClaims:
    return decoded(token, verified, _AnyClaims, lambda found: found.iss)


def test_a_servers_question_is_read_and_the_clients_signature_is_of_the_nonce() -> None:
    said = asked()
    assert said.server_id.id == "NC6KT4DIFD26YUUFIC3EDK7OJNIGD56L2W6WAOIU5MJZ5YCTA7GYQ2SE"
    assert said.user_nkey == "UDGF7IHOKLYVRHSODIRMJU7ZBEVTAIWWB2WPYNY5TMDFAKFQLKL7GPKZ"
    assert (said.connect_opts.nkey, said.connect_opts.name, said.client_info.host) == (KEY, "runtime-r1", "127.0.0.1")
    assert said.connect_opts.auth_token == f"st-join-{'1' * 32}-{'2' * 48}"
    assert verified(KEY, said.client_info.nonce.encode(), claims.signature(said.connect_opts.sig))


@pytest.mark.parametrize("part", range(3))
def test_a_question_with_a_changed_letter_is_refused(part: int) -> None:
    parts = QUESTION.split(".")
    parts[part] = ("A" if parts[part][10] != "A" else "B").join((parts[part][:10], parts[part][11:]))
    with pytest.raises(ClaimsError):
        question(".".join(parts).encode(), verified)


def _resigned(key: SigningKey, **changed: object) -> bytes:
    body = json.loads(base64.urlsafe_b64decode(QUESTION.split(".")[1] + "=="))
    said = body | changed
    said.pop("iss")
    return claims.signed(said, key.public_key, key.sign, 1).encode()


def test_a_question_that_the_named_server_has_not_signed_is_refused() -> None:
    with pytest.raises(ClaimsError, match="a server other than the named server"):
        question(_resigned(SigningKey(new_seed("server"))), verified)


def test_a_question_for_another_reader_is_refused() -> None:
    key = SigningKey(new_seed("server"))
    nats = msgspec.to_builtins(asked()) | {"server_id": {"id": key.public_key}}
    assert question(_resigned(key, nats=nats), verified).server_id.id == key.public_key
    with pytest.raises(ClaimsError, match="for a different reader"):
        question(_resigned(key, nats=nats, aud="somebody"), verified)


def test_a_token_of_another_algorithm_is_refused() -> None:
    """The token here says `none`, and has no signature."""
    header = base64.urlsafe_b64encode(b'{"typ":"JWT","alg":"none"}').decode().rstrip("=")
    with pytest.raises(ClaimsError, match="not signed by ed25519-nkey"):
        question(f"{header}.{QUESTION.split('.')[1]}.".encode(), verified)


def test_a_question_beyond_the_bound_is_not_read() -> None:
    with pytest.raises(ClaimsError, match="at most 65536"):
        question(b"x" * (claims.REQUEST_BYTES_MOST + 1), verified)


@given(st.binary(max_size=200) | st.text(alphabet="eyJ0.-_", max_size=200).map(str.encode))
def test_words_that_are_no_token_raise_nothing_else(words: bytes) -> None:
    with pytest.raises(ClaimsError):
        question(words, verified)


def test_an_answer_has_exactly_the_rights_of_the_user() -> None:
    user = grants.runtime("r1")
    answer = read(admitted(asked(), user, "runtime-r1/K", ISSUER.public_key, ISSUER.sign, 1_700_000_000))
    assert (answer.iss, answer.sub, answer.aud) == (ISSUER.public_key, asked().user_nkey, asked().server_id.id)
    assert answer.nats.keys() == {"jwt", "type", "version"} and answer.nats["type"] == "authorization_response"
    who = read(answer.nats["jwt"].encode())
    assert (who.iss, who.sub, who.aud, who.name) == (ISSUER.public_key, asked().user_nkey, "$G", "runtime-r1/K")
    assert who.iat == 1_700_000_000 and "exp" not in answer.nats
    assert who.nats == {
        "pub": {"allow": user.publishes},
        "sub": {"allow": user.subscribes},
        "resp": {"max": 1, "ttl": 120 * 10**9},
        "subs": -1,
        "data": -1,
        "payload": -1,
        "type": "user",
        "version": 2,
    }


def test_a_user_that_answers_nothing_gets_no_right_to_answer() -> None:
    answer = read(admitted(asked(), grants.SCHEDULER, "s", ISSUER.public_key, ISSUER.sign, 1))
    assert "resp" not in read(answer.nats["jwt"].encode()).nats


def test_a_refusal_names_the_client_and_no_reason() -> None:
    answer = read(refused(asked(), ISSUER.public_key, ISSUER.sign, 1))
    assert (answer.sub, answer.aud) == (asked().user_nkey, asked().server_id.id)
    assert answer.nats == {"error": "not admitted", "type": "authorization_response", "version": 2}


@pytest.mark.parametrize("said", ("", "?", "ä", "AAAA", "a" * 1000))
def test_a_malformed_signature_is_of_nothing(said: str) -> None:
    assert not verified(KEY, b"nonce", claims.signature(said))
