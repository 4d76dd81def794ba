"""Digests of a release's images: `resolve` asks registries, `check` refuses a tag without a digest.

The lock is a file of lines NAME=IMAGE:TAG or NAME=IMAGE:TAG@sha256:DIGEST. `get NAME` prints the image of a line, after
a `check` of the whole lock.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

LOCK = Path(__file__).parent / "helm/staccato/images.lock"
LINE = re.compile(r"([A-Z]+_IMAGE)=([a-z0-9./_-]+:[\w.-]+)(@sha256:[0-9a-f]{64})?")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
DEADLINE_S = 60.0  # for a registry's answer
# By tool: arguments that print the digest of an image's index. The first installed tool is asked.
TOOLS = {
    "crane": ["digest", "{image}"],
    "skopeo": ["inspect", "--format", "{{.Digest}}", "docker://{image}"],
    "docker": ["buildx", "imagetools", "inspect", "--format", "{{.Manifest.Digest}}", "{image}"],
}


class ImagesError(Exception):
    """A sentence on why a release can't be made."""


def images(lock: Path) -> dict[str, tuple[str, str]]:
    """Images in the file `lock`, by name: IMAGE:TAG, and `@sha256:…` or an empty text.

    Raises ImagesError for a line that can't be read."""
    found = {}
    for number, line in enumerate(lock.read_text().splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        match = LINE.fullmatch(line)
        if match is None:
            raise ImagesError(f"{lock}, line {number}: {line!r} is not NAME_IMAGE=IMAGE:TAG[@sha256:DIGEST]")
        found[match[1]] = (match[2], match[3] or "")
    return found


def check(lock: Path) -> None:
    """Raise ImagesError with the names of images without a digest, if any."""
    loose = [image for image, digest in images(lock).values() if not digest]
    if loose:
        raise ImagesError(
            f"{len(loose)} images have a tag and no digest ({', '.join(loose)}): `make digests` asks the registries"
        )


def resolve(lock: Path) -> None:
    """Write the present digest of every tag into the file `lock`. On ImagesError the file stays unchanged."""
    tool = next((name for name in TOOLS if shutil.which(name)), None)
    if tool is None:
        raise ImagesError(
            f"none of {', '.join(TOOLS)} is installed: install one, which asks the registries for digests"
        )
    text = lock.read_text()
    for name, (image, digest) in images(lock).items():
        text = text.replace(f"{name}={image}{digest}\n", f"{name}={image}@{_asked(tool, image)}\n")
    draft = lock.with_name(f".{lock.name}")
    draft.write_text(text)
    draft.rename(lock)


def _asked(tool: str, image: str) -> str:
    command = [tool, *(word.replace("{image}", image) for word in TOOLS[tool])]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    except subprocess.TimeoutExpired as error:
        raise ImagesError(f"{tool} has no answer for {image} after {DEADLINE_S:g} s: try again") from error
    said = ran.stdout.strip()
    if ran.returncode or not DIGEST.fullmatch(said):
        why = (ran.stderr.strip() or said or "nothing").splitlines()[-1]
        raise ImagesError(f"{tool} gives no digest for {image}: {why}")
    return said


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lock", type=Path, default=LOCK)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("resolve", help="write the digest behind each tag into the lock")
    commands.add_parser("check", help="refuse a lock with a tag without a digest")
    commands.add_parser("get", help="print one image with its digest").add_argument("name")
    said = parser.parse_args(arguments)
    try:
        if said.command == "resolve":
            resolve(said.lock)
        else:
            check(said.lock)
        if said.command == "get":
            known = images(said.lock)
            if said.name not in known:
                raise ImagesError(f"no image {said.name}: one of {', '.join(known)} is in {said.lock}")
            print("".join(known[said.name]))
    except (ImagesError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
