"""Makes a model's image in the host cache, in a process of its own: `python -m runtime.device.imaging BEGAN`.

The process reads the model's files, asks the golden question and writes the image; afterwards any device process of the
host builds an engine around the image. A model that ends this process takes no other model along. The node starts the
process (runtime/node/child.py) and reads the result from a pipe.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from time import monotonic

import msgspec

from runtime.core.engine import EngineError
from runtime.device.stepping import Stepping
from store.contract.wire import EngineSpec
from store.telemetry import observe

NICE = 10  # steps of a device on the same cores come first


class ImageBegan(msgspec.Struct, frozen=True):
    """Settings of the process, passed as JSON in the command line. File descriptors are inherited."""

    spec: EngineSpec
    pool_bytes: int  # addresses for pages, as the device has; memory is taken for the weights and a question alone
    host_bytes: int
    host_fd: int
    stepping_fd: int
    said_fd: int  # gets an ImageSaid at the end

    def arguments(self) -> list[str]:
        return [msgspec.json.encode(self).decode()]


class ImageSaid(msgspec.Struct, frozen=True):
    """The end of the process. Without an error, the host cache has the image."""

    error: str = ""


def main() -> None:
    began = msgspec.json.decode(sys.argv[1], type=ImageBegan)
    observe.configure_logs("image")
    os.nice(NICE)
    from runtime.engine.builder import Builder  # takes seconds, unless forked
    from runtime.engine.selfcheck import use_threads

    use_threads()
    stepping, model, error = Stepping(began.stepping_fd), began.spec.key, ""
    stepping.begin_build(model, since := monotonic())
    try:
        builder = Builder(began.pool_bytes, began.host_bytes, began.host_fd)
        builder.build(began.spec, partial(stepping.read, model, since))
        builder.images.close()  # unpins the image, before the device is told
    except Exception as raised:
        error = str(raised) if isinstance(raised, EngineError) else type(raised).__name__
    os.write(began.said_fd, msgspec.json.encode(ImageSaid(error)))
    os._exit(0)  # skips vLLM's exit handlers: the process's end tears down everything anyway


if __name__ == "__main__":
    main()
