"""The process `staccato controller`: the leader of several controllers brings custom resources onto the platform."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import uuid
from datetime import UTC, datetime
from typing import Annotated

import structlog
from pydantic import BeforeValidator, Field, SecretStr
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from gateway.cli.terminal.client import GatewayClient
from gateway.core.declared.objects import MANAGER, Ref
from gateway.core.declared.reconciler import RestCall
from gateway.declared.kubernetes import ClusterSource, KubernetesLease, connected
from gateway.declared.lease import RENEW_S, LeaseCandidate
from gateway.declared.platform import CallFailed, RestPlatform
from gateway.declared.reconciling import Reconciler
from store.settings import PREFIX, SettingsError, read
from store.telemetry import observe, signs

log = structlog.get_logger()

REFRESH_S = 300.0  # between two lists of all objects, beside the watches
PASS_S_LEAST = 0.2  # between two passes
LOOK_S = 1.0  # between two looks of a waiting controller


def _words(value: object) -> object:
    return value.replace(",", " ").split() if isinstance(value, str) else value


class ControllerSettings(BaseSettings):
    """Settings of the controller."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", env_ignore_empty=True)

    url: str  # URL of the gateway
    key: SecretStr  # an operator's key with the scopes tenants and deployments
    public_url: str = ""  # URL of the gateway for tenants; empty: `url`
    namespaces: Annotated[
        tuple[str, ...], NoDecode, BeforeValidator(_words)
    ] = ()  # empty: the namespace of the controller
    manager: str = Field(MANAGER, pattern=r"^[A-Za-z0-9._-]{1,63}$")  # first part of every mark


class CallLog:
    """Writes calls to the log."""

    def called(self, ref: Ref, call: RestCall, trouble: CallFailed | None) -> None:
        if trouble:
            log.warning("controller.refused", name=str(ref), detail=str(call), error=str(trouble))
        else:
            log.info("controller.called", name=str(ref), detail=str(call))

    def away(self, error: CallFailed) -> None:
        log.warning("controller.away", error=str(error))


class Controller:
    """Follows custom resources, and acts while leading. `run` returns after `stop`."""

    def __init__(self, settings: ControllerSettings) -> None:
        client = connected()
        self._wake, self._stopped = threading.Event(), threading.Event()
        self._gateway = GatewayClient(settings.url.rstrip("/"), settings.key.get_secret_value())
        self._cluster = ClusterSource(
            client, settings.namespaces or (str(client.namespace),), settings.manager, self._wake.set
        )
        lease = KubernetesLease(client, f"{settings.manager}-controller".lower().replace("_", "-"))
        id = f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
        self._candidate = LeaseCandidate(id, lease, time.monotonic, lambda: datetime.now(UTC))
        self._reconciler = Reconciler(
            self._cluster,
            RestPlatform(self._gateway),
            settings.manager,
            (settings.public_url or settings.url).rstrip("/"),
            time.monotonic,
            CallLog(),
            may_act=lambda: self._candidate.may_act,
        )

    def stop(self) -> None:
        self._stopped.set()
        self._wake.set()

    def run(self) -> None:
        self._cluster.start()
        campaign = threading.Thread(target=self._campaign, name="campaign", daemon=True)
        campaign.start()
        refresh_at_s = time.monotonic() + REFRESH_S
        with self._gateway:
            while not self._stopped.is_set():
                self._wake.clear()
                if time.monotonic() > refresh_at_s:
                    refresh_at_s = time.monotonic() + REFRESH_S
                    self._refresh()
                wait_s = self._reconciler.once().next_s if self._candidate.may_act and self._cluster.listed else LOOK_S
                self._stopped.wait(PASS_S_LEAST)
                self._wake.wait(max(0.0, wait_s - PASS_S_LEAST))
        campaign.join(RENEW_S)
        with contextlib.suppress(CallFailed):
            self._candidate.resign()

    def _refresh(self) -> None:
        try:
            self._cluster.refresh()
        except CallFailed as error:
            log.warning("controller.away", error=str(error))

    def _campaign(self) -> None:
        led = False
        while not self._stopped.is_set():
            try:
                self._candidate.campaign()
            except CallFailed as error:
                log.warning("controller.lease", error=str(error))
            if self._candidate.may_act != led:
                led = not led
                if led:
                    log.info("controller.leads")
                else:
                    log.info("controller.follows")
                self._wake.set()
            signs.note(self._cluster.listed)
            self._stopped.wait(RENEW_S)


def main() -> int:
    observe.configure_logs("controller")
    try:
        controller = Controller(read(ControllerSettings, ("key",)))
    except (SettingsError, CallFailed) as error:
        print(f"controller: {error}", file=sys.stderr)
        return 1
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: controller.stop())
    log.info("controller.ready", name=os.environ.get("HOSTNAME", ""))
    controller.run()
    return 0
