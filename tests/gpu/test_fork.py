"""A forked process uses the GPU, and the fork server that has imported vLLM does not begin with the GPU."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from store.fork import client
from tests.conftest import ROOT

CODE = """
import torch
print(int(torch.arange(1000, device="cuda").sum()))
"""


async def test_processes_forked_one_after_another_use_the_gpu(torch: Any, tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text(CODE)
    ours, theirs = client.sockets()
    paths = os.pathsep.join(filter(None, (str(ROOT), str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    environment = os.environ | {"PYTHONPATH": paths} | client.VARIABLES
    command = client.server_command(theirs.fileno())
    server = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
    try:
        for _ in range(2):
            reading, writing = os.pipe()
            process = await client.ForkServer(ours).fork("sums", (), environment, {0: 0, 1: writing, 2: 2})
            os.close(writing)
            assert await process.wait() == 0
            with open(reading) as pipe:
                assert pipe.read() == "499500\n"
    finally:
        server.kill()
        server.wait()
        ours.close()
        theirs.close()
