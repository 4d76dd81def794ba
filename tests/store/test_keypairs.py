"""Keys of NATS: made, read, used to sign and to check."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from store.kept import kept
from store.keypairs import SigningKey, is_of_user, new_seed, verified

# Made by nats-io's own tool.
SEED = "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY"
PUBLIC = "UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4"


def test_a_seed_of_another_implementation_has_the_public_key_of_that_implementation() -> None:
    assert SigningKey(SEED + "\n").public_key == PUBLIC and is_of_user(PUBLIC)


@pytest.mark.parametrize("kind", ("user", "account", "server"))
def test_a_signature_is_known_by_the_public_key_alone(kind: str) -> None:
    key, other = SigningKey(new_seed(kind)), SigningKey(new_seed(kind))  # type: ignore[arg-type]
    signature = key.sign(b"nonce")
    assert verified(key.public_key, b"nonce", signature)
    assert not verified(key.public_key, b"another nonce", signature)
    assert not verified(other.public_key, b"nonce", signature)
    assert not verified(key.public_key, b"nonce", signature[:-1])
    wrong = "B" if key.public_key.endswith("A") else "A"
    assert not verified(key.public_key[:-1] + wrong, b"nonce", signature)


@given(st.text(), st.binary(max_size=80))
def test_a_strangers_words_are_no_key_and_raise_nothing(key: str, signature: bytes) -> None:
    assert not verified(key, b"nonce", signature)


@pytest.mark.parametrize("text", ("", "SU", PUBLIC, SEED[:-1] + "A" * 9, "ä" * 58))
def test_a_text_that_is_no_seed_is_refused_without_being_shown(text: str) -> None:
    with pytest.raises(ValueError, match="no seed of an nkey") as raised:
        SigningKey(text)
    assert not text or text not in str(raised.value)


def test_a_kept_text_stays_and_is_for_its_user_alone(tmp_path: Path) -> None:
    file = tmp_path / "new" / "key.nk"
    assert [kept(file, "first"), kept(file, "second")] == ["first", "first"]
    assert file.stat().st_mode & 0o777 == 0o600 and list(file.parent.iterdir()) == [file]
