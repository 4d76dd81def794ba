"""The join service: lets runtimes join the bus by proof, and ends connections of revoked runtimes.

nats-server asks the service about every client whose key is not in the server's configuration. The service listens on
no port. Several services share the questions. While no service or no database is there, connected runtimes go on, and
new connections are refused and try again.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import structlog
import uvloop
from pydantic_settings import BaseSettings, SettingsConfigDict

from gateway.config import Settings, load, pepper
from gateway.joining.desk import LOOKUP_S, JoinDesk
from gateway.joining.evicting import evict
from store.bus import BusError
from store.db.database import Database, DatabaseError
from store.keypairs import SigningKey
from store.settings import SettingsError, read
from store.system import Answer, SystemBus
from store.tasks import ended
from store.telemetry import observe, signs

log = structlog.get_logger()

QUESTIONS_MOST = 1024  # at a time, most of them refusals that wait; a further question gets no answer


class JoinSettings(BaseSettings):
    """Settings of the join service alone; the others are `gateway.config.Settings`."""

    model_config = SettingsConfigDict(env_prefix="STACCATO_", extra="ignore")

    join_issuer: Path  # file with the seed of the account that the servers' configuration names as issuer

    def signing_key(self) -> SigningKey:
        """Return the issuer's key. Raises SettingsError."""
        try:
            key = SigningKey(self.join_issuer.read_text())
            if not key.public_key.startswith("A"):
                raise ValueError("the seed is of a user")
        except OSError as error:
            raise _issuer_error(self.join_issuer, error.strerror or str(error)) from error
        except ValueError as error:
            raise _issuer_error(self.join_issuer, str(error)) from error
        return key


def _issuer_error(file: Path, reason: str) -> SettingsError:
    return SettingsError(
        f"STACCATO_JOIN_ISSUER={file}: {reason}: name issuer.nk, as `staccato nats-users --join` has it"
    )


def shared_pepper(settings: Settings) -> bytes:
    """Return the gateways' pepper. Raises SettingsError if the file is missing: a fresh pepper would know no token."""
    if not settings.pepper_file.exists():
        raise SettingsError(f"{settings.pepper_file} is not there: copy the gateway's, or set STACCATO_DATA")
    return pepper(settings)


class JoinService:
    """Hears the questions of the servers on the bus, and has each question answered at the desk."""

    def __init__(self, bus: SystemBus, desk: JoinDesk) -> None:
        self._bus, self._desk = bus, desk
        self._answering: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        await self._bus.hear_logins(self._heard)

    async def stop(self) -> None:
        await ended(*self._answering)

    def _heard(self, question: bytes, answer: Answer) -> None:
        if len(self._answering) < QUESTIONS_MOST:
            task = asyncio.create_task(self._attend(question, answer))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    async def _attend(self, question: bytes, answer: Answer) -> None:
        try:
            said = await self._desk.answer(question)
        except Exception as error:  # a question must not end the service
            log.error("join.failed", error=observe.place_of(error))
            return
        if said is not None:
            await answer(said)


@contextlib.asynccontextmanager
async def serving(settings: Settings, own: JoinSettings) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Serve for the time of the context, and yield the endless jobs. Raises BusError, DatabaseError, SettingsError."""
    url = settings.nats_url or "nats://127.0.0.1:4222"
    issuer, secret = own.signing_key(), shared_pepper(settings)
    database = Database(settings.database_url, busy_timeout_s=LOOKUP_S / 2)
    try:
        await database.check()
        async with SystemBus.connect(url, settings.nats_credentials, settings.nats_ca) as bus:
            service = JoinService(bus, JoinDesk(database, issuer, secret))
            await service.start()
            jobs = [asyncio.create_task(job) for job in (evict(bus, database), signs.give(lambda: bus.connected))]
            log.info("join.ready", database=database.shown_url)
            try:
                yield jobs
            finally:
                await ended(*jobs)
                await service.stop()
    finally:
        await database.close()


async def run(settings: Settings, own: JoinSettings) -> None:
    """Serve until SIGTERM or SIGINT. Raises BusError, DatabaseError, SettingsError, and the error of a failed job."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with serving(settings, own) as jobs:
        stopping = asyncio.create_task(stop.wait())
        done, _ = await asyncio.wait([*jobs, stopping], return_when=asyncio.FIRST_COMPLETED)
        await ended(stopping)
        for job in done - {stopping}:
            job.result()


def main() -> int:
    observe.configure_logs("join")
    try:
        uvloop.run(run(load(), read(JoinSettings)))
    except (SettingsError, BusError, DatabaseError) as error:
        print(f"join: {error}", file=sys.stderr)
        return 1
    return 0
