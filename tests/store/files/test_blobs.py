"""The store of imported files: two imports of equal files that end at the same time."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from store.files.blobs import Blobs

CONTENT = b"weights"
SHA256 = hashlib.sha256(CONTENT).hexdigest()
FILES = {"model.safetensors": SHA256}
MEETING_S = 0.3


class MeetingBlobs(Blobs):
    """A store in which two threads that link the same files wait for each other, at most `MEETING_S` seconds."""

    barrier = threading.Barrier(2)

    def _link(self, files: Mapping[str, str], folder: Path) -> None:
        super()._link(files, folder)
        try:
            self.barrier.wait(MEETING_S)
        except threading.BrokenBarrierError:
            pass


def test_two_imports_of_equal_files_at_once_make_the_folder_once(tmp_path: Path) -> None:
    blobs = MeetingBlobs(tmp_path)
    with blobs.claimed(SHA256, lambda: None) as partial:
        partial.write_bytes(CONTENT)
        blobs.keep(partial, SHA256)

    def assembled() -> tuple[Path, int]:
        path = blobs.assemble(FILES)
        return path, path.stat().st_ino

    with ThreadPoolExecutor(2) as threads:
        first, second = (future.result() for future in [threads.submit(assembled) for _ in range(2)])
    assert first == second and (first[0] / "model.safetensors").read_bytes() == CONTENT
    assert first[0].stat().st_ino == first[1], "the folder of the first import was replaced"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        "blobs",
        "folders",
        "folders.lock",
        "known",
        "partial",
    ]
