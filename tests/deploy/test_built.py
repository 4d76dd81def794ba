"""The images are built from the Dockerfile, and their containers serve a request as the compose file starts them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.demo.random_weights import write_random
from gateway.ops.bus_servers import nats_binary
from tests.databases import programs
from tests.deploy.containers import Container, Network, Storage, needed
from tests.deploy.test_compose import COMPOSE, FILE, make_secrets

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
TARGETS = ("gateway", "runtime-cpu")
POINTS = ["/run/secrets", "/models", "/imported", "/var/lib/staccato"]
MOST_BYTES = 3_600_000_000  # of an image: 3.4 GB in November 2026
SETTINGS = {"STACCATO_DEVICE_MEMORY": "64MiB", "STACCATO_HOST_CACHE": "128MiB"}
URL = "http://127.0.0.1:8080"
SOON_S = 240


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Storage]:
    """The images, built once."""
    needed()
    storage = Storage(tmp_path_factory.mktemp("images"))
    try:
        storage.make_base()
        for target in TARGETS:
            storage.build(target)
        yield storage
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):
            storage.buildah("rmi", "--all", "--force")
        shutil.rmtree(storage.folder, ignore_errors=True)


@pytest.mark.parametrize("target", TARGETS)
def test_an_image_is_of_known_size_and_has_nothing_that_built_it(storage: Storage, target: str) -> None:
    image = f"localhost/staccato-{target}"
    sizes = storage.layers(image)
    print(image, [round(size / 1e6, 1) for size in sizes], "MB")
    assert sum(sizes) <= MOST_BYTES
    with storage.mounted(image, []) as root:
        programs = {path.name for folder in ("usr/bin", "opt/staccato/.venv/bin") for path in (root / folder).iterdir()}
        packages = {path.name for path in (root / "opt/staccato/.venv/lib/python3.11/site-packages").iterdir()}
    assert not programs & {"gcc", "g++", "make", "pytest", "ruff"}
    assert not packages & {"pip", "pytest", "moto", "playwright", "flask", "schemathesis"}
    assert {"vllm", "torch", "starlette"} <= packages


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    make_secrets(tmp_path / "secrets", "r1")
    return tmp_path / "secrets"


def test_the_containers_of_compose_serve_a_request_and_book_the_request(
    storage: Storage, secrets: Path, tmp_path: Path
) -> None:
    for file in write_random(tmp_path / "models/toy", "llama").iterdir():
        file.chmod(0o644)  # the containers have a user of their own
    network = Network(tmp_path, ("nats", "postgres", "gateway"))
    with network.up(), database(network, secrets), bus(network, secrets, tmp_path):
        started = Started(storage, network, secrets, tmp_path)
        with started.images():
            assert started.start("migrate").process.wait(SOON_S) == 0
            roles = {name: started.start(name) for name in ("ledger", "scheduler", "gateway", "runtime-cpu")}
            for container in roles.values():
                until(container.healthy)
            serve(network, (secrets / "platform/STACCATO_ADMIN_KEY").read_text().strip())
            assert {name: container.stop() for name, container in roles.items()} == dict.fromkeys(roles, 0)


def serve(network: Network, admin: str) -> None:
    """Register a model, deploy the model for a tenant, ask for tokens, and see the booked usage."""
    api = f"{URL}/api/v1"
    booked = f"{api}/usage?group_by=deployment"

    def made(method: str, path: str, body: object) -> Any:
        status, answer = network.ask(method, f"{api}{path}", admin, body)
        assert status in (200, 201, 202), answer
        return answer

    made("POST", "/tenants", {"name": "acme"})
    key = made("POST", "/tenants/acme/keys", {"name": "k"})["key"]
    made("POST", "/models", {"name": "toy", "source": "/models/toy"})
    until(lambda: network.ask("GET", f"{api}/models/toy", admin)[1]["state"] != "importing")
    made("POST", "/deployments", {"name": "chat", "model": "toy", "tenant": "acme", "dtype": "float32"})
    body = {"model": "chat", "prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    status, answer = network.ask("POST", f"{URL}/v1/completions", key, body)
    assert status == 200 and answer["usage"]["completion_tokens"] == 8, answer
    until(lambda: [row["output_tokens"] for row in network.ask("GET", booked, key)[1]["data"]] in ([8], ["8"]))


class Started:
    """Started services of the compose file. Each service is a container of an image in `storage`."""

    def __init__(self, storage: Storage, network: Network, secrets: Path, folder: Path) -> None:
        self.compose = yaml.safe_load(FILE.read_text())
        self.storage, self.network, self.secrets, self.folder = storage, network, secrets, folder
        self.roots: dict[str, Path] = {}
        self.containers: list[Container] = []

    @contextlib.contextmanager
    def images(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for target in TARGETS:
                mounted = self.storage.mounted(f"localhost/staccato-{target}", POINTS)
                self.roots[target] = stack.enter_context(mounted)
            try:
                yield
            finally:
                for container in self.containers:
                    container.kill()

    def start(self, name: str) -> Container:
        service = self.compose["services"][name]
        assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["tmpfs"] == ["/tmp"]
        target = service["build"]["target"]
        image = self.storage.settings(f"localhost/staccato-{target}")
        environment = {key: resolved(str(value)) for key, value in service["environment"].items()}
        volumes = {"/run/secrets": (self._secrets(name, service), False)}
        for volume in service.get("volumes", []):
            source, inside, *only = re.split(r":(?=/|ro$)", volume)
            outside = self.folder / ("models" if inside == "/models" else source)
            if not outside.exists():  # a named volume begins with the owner of the image's folder
                outside.mkdir()
                os.chown(outside, *map(int, image["User"].split(":")))
            volumes[inside] = (outside, "ro" not in only)
        root = self.roots[target]
        arguments = service.get("command", [])
        self.containers.append(Container.start(root, image, self.network, arguments, environment, volumes))
        return self.containers[-1]

    def _secrets(self, name: str, service: dict[str, Any]) -> Path:
        folder = self.folder / f"secrets-of-{name}"
        folder.mkdir()
        for secret in service["secrets"]:
            given = {"source": secret, "target": secret} if isinstance(secret, str) else secret
            file = self.compose["secrets"][given["source"]]["file"]
            path = Path(file.replace("${STACCATO_SECRET_FILES:-./secrets}", str(self.secrets)))
            shutil.copy(path, folder / given["target"])  # with the mode of the operator's file
        return folder


def resolved(value: str) -> str:
    """A value of the compose file with the settings of the test, or with the file's defaults."""
    return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda found: SETTINGS.get(found[1], found[2]), value)


@contextlib.contextmanager
def database(network: Network, secrets: Path) -> Iterator[None]:
    """PostgreSQL in the network, with the password of the secrets, where compose has the image of PostgreSQL."""
    found = programs()
    if found is None:
        pytest.skip("no PostgreSQL: install Debian's `postgresql`")
    as_user: list[str | Path] = ["setpriv", "--reuid", "postgres", "--regid", "postgres", "--clear-groups"]
    # PostgreSQL's user can't enter the test's folder.
    with tempfile.TemporaryDirectory(prefix="staccato-pg-") as folder:
        data, password = Path(folder) / "data", shutil.copy(secrets / "platform/postgres_password", folder)
        for path in (folder, password):
            shutil.chown(path, "postgres", "postgres")
        initdb: list[str | Path] = [found / "initdb", "-D", data, "-U", "staccato", "-A", "scram-sha-256"]
        initdb += ["--pwfile", password, "--no-sync"]
        subprocess.run([*as_user, *initdb], check=True, stdout=subprocess.DEVNULL)
        options: list[str | Path] = ["-D", data, "-h", "127.0.0.1", "-k", folder, "-F"]
        with subprocess.Popen(network.command(*as_user, found / "postgres", *options)) as server:
            environment = os.environ | {"PGPASSWORD": Path(password).read_text().strip()}
            create = network.command(found / "createdb", "-h", "127.0.0.1", "-U", "staccato", "staccato")
            until(lambda: subprocess.run(create, env=environment, capture_output=True).returncode == 0)
            try:
                yield
            finally:
                server.send_signal(signal.SIGINT)


@contextlib.contextmanager
def bus(network: Network, secrets: Path, folder: Path) -> Iterator[None]:
    """NATS in the network, with the configuration of compose, where compose has the image of NATS."""
    text = (COMPOSE / "nats.conf").read_text()
    places = {"/run/secrets/nats_cert": "nats.crt", "/run/secrets/nats_key": "nats.key"}
    for inside, file in places.items():
        text = text.replace(inside, str(secrets / "nats" / file))
    (folder / "nats.conf").write_text(text.replace('"/data"', f'"{folder / "nats"}"'))
    shutil.copy(secrets / "nats/users.conf", folder)
    binary = nats_binary()
    assert binary is not None
    with subprocess.Popen(network.command(binary, "--config", folder / "nats.conf")) as server:
        try:
            yield
        finally:
            server.terminate()


def until(true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + SOON_S
    while not true():
        assert time.monotonic() < deadline_s, "it did not come"
        time.sleep(0.5)
