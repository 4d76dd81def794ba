"""The gateway's HTTP protocol around the compared application: `python -m ...bounded PORT`, on loopback."""

from __future__ import annotations

import sys

import uvicorn

from gateway.http.limits import ConnectionLimits, protocol
from tests.bench.gateway.http_servers.app import app

if __name__ == "__main__":
    uvicorn.run(
        app,
        port=int(sys.argv[1]),
        http=protocol(ConnectionLimits()),
        ws="none",
        loop="uvloop",
        access_log=False,
        log_level="warning",
    )
