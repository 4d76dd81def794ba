"""The desk at which runtimes show their proofs: checks a server's question, asks the database, answers.

Cheap checks come first: signatures and forms, before the database is asked. Lookups at a time, waiting
lookups and lines of the log have bounds, so that strangers who connect in a loop cost little.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import structlog

from store.contract import grants
from store.contract.joining import claims, proofs
from store.contract.joining.proofs import JoinProof, JoinsNow, NotAdmitted
from store.db.database import Database, DatabaseError
from store.db.fleet import joining
from store.db.tenants import key_mac
from store.keypairs import SigningKey, is_of_user, verified

log = structlog.get_logger()

LOOKUPS_MOST = 8  # in the database at a time
WAITING_MOST = 128  # lookups that wait or run; a further one is refused, and the runtime tries again
LOOKUP_S = 1.0  # longest wait for the database, within the server's CALLOUT_S
DELAY_S = 0.4  # from a refusal to the answer, within CALLOUT_S as well: a stranger tries no faster
DELAYED_MOST = 512  # refusals that wait; further refusals are answered at once
LINES_MOST, LINES_PERIOD_S = 20, 10.0  # lines on refusals


@dataclass(frozen=True)
class SeenClient:
    """Client as the log names the client: id, key and address, and never a token."""

    runtime: str
    public_key: str
    host: str


class RefusalLines:
    """Lines of the log on refusals: in LINES_PERIOD_S seconds at most LINES_MOST, and a single line on a client and a
    reason, so that a client that tries on hides no other client. Then follows a line with the number left out."""

    def __init__(self) -> None:
        self._until, self._left_out = 0.0, 0
        self._said: set[tuple[SeenClient, str]] = set()

    def say(self, client: SeenClient, reason: str, now_s: float) -> None:
        """Log a refusal, or count the refusal. `now_s`: seconds of a clock that never goes back."""
        if now_s >= self._until:
            if self._left_out:
                log.warning("join.refusals_left_out", requests=self._left_out)
            self._until, self._left_out = now_s + LINES_PERIOD_S, 0
            self._said.clear()
        if (client, reason) in self._said or len(self._said) >= LINES_MOST:
            self._left_out += 1
            return
        self._said.add((client, reason))
        log.warning(
            "join.refused", reason=reason, runtime=client.runtime, public_key=client.public_key, source=client.host
        )


class JoinDesk:
    """Answers the questions of nats-servers about clients. `pepper`: the secret under which the database keeps
    tokens."""

    def __init__(self, database: Database, issuer: SigningKey, pepper: bytes) -> None:
        self._database, self._issuer, self._pepper = database, issuer, pepper
        self._lookups = asyncio.Semaphore(LOOKUPS_MOST)
        self._waiting = self._delayed = 0
        self._lines = RefusalLines()

    async def answer(self, question: bytes) -> bytes | None:
        """Return the answer to a server's question; None: the question is not by a server, and gets no answer."""
        try:
            asked = claims.question(question, verified)
        except claims.ClaimsError as error:
            self._lines.say(SeenClient("", "", ""), str(error), time.monotonic())
            return None
        admitted = await self._admitted(asked)
        issuer, now_s = self._issuer, int(time.time())
        if isinstance(admitted, NotAdmitted):
            await self._refuse(shown(asked), admitted.reason)
            return claims.refused(asked, issuer.public_key, issuer.sign, now_s)
        user, name = grants.runtime(admitted.runtime), connection_name(admitted.runtime, admitted.public_key)
        return claims.admitted(asked, user, name, issuer.public_key, issuer.sign, now_s)

    async def _admitted(self, asked: claims.LoginQuestion) -> JoinProof | NotAdmitted:
        """Return the proof of a runtime that may come in, or the reason against."""
        proof = proof_of(asked)
        if isinstance(proof, NotAdmitted):
            return proof
        if self._waiting >= WAITING_MOST:
            return NotAdmitted(f"{WAITING_MOST} clients wait for the database already")
        token = asked.connect_opts.auth_token
        mac = key_mac(self._pepper, token) if token else None
        self._waiting += 1
        try:
            async with asyncio.timeout(LOOKUP_S), self._lookups:
                admission = await joining.admit(self._database, proof, mac)
        except (DatabaseError, TimeoutError) as error:
            return NotAdmitted(f"the database does not answer: {error or f'nothing within {LOOKUP_S} s'}")
        finally:
            self._waiting -= 1
        if isinstance(admission, NotAdmitted):
            return admission
        if isinstance(admission, JoinsNow):
            log.info("join.joined", runtime=proof.runtime, public_key=proof.public_key)
        return proof

    async def _refuse(self, client: SeenClient, reason: str) -> None:
        self._lines.say(client, reason, time.monotonic())
        if self._delayed < DELAYED_MOST:
            self._delayed += 1
            try:
                await asyncio.sleep(DELAY_S)
            finally:
                self._delayed -= 1


def proof_of(asked: claims.LoginQuestion) -> JoinProof | NotAdmitted:
    """Return the proof in a question, with the signature of the nonce checked; or the reason why there is none."""
    client = asked.connect_opts
    if not is_of_user(client.nkey):
        return NotAdmitted("no key came")
    nonce = asked.client_info.nonce
    if not nonce or not verified(client.nkey, nonce.encode(), claims.signature(client.sig)):
        return NotAdmitted("the signature is not of this connection's nonce")
    runtime = client.name.removeprefix(proofs.NAME_PREFIX)
    if client.name == runtime or not proofs.RUNTIME_ID.fullmatch(runtime):
        return NotAdmitted("the client has no name of a runtime")
    if client.auth_token and not proofs.TOKEN.fullmatch(client.auth_token):
        return NotAdmitted("the join token is malformed")
    return JoinProof(runtime, client.nkey, bool(client.auth_token))


def shown(asked: claims.LoginQuestion) -> SeenClient:
    """Return the words for a line of the log: words of a stranger's own choice are left out."""
    runtime = asked.connect_opts.name.removeprefix(proofs.NAME_PREFIX)
    runtime = runtime if proofs.RUNTIME_ID.fullmatch(runtime) else ""
    key = asked.connect_opts.nkey
    return SeenClient(runtime, key if is_of_user(key) else "", asked.client_info.host)


def connection_name(runtime: str, public_key: str) -> str:
    """Return the name by which a server lists the connection of a joined runtime. No user of a configuration has such a
    name, since the server lists such users by their keys."""
    return f"{proofs.NAME_PREFIX}{runtime}/{public_key}"
