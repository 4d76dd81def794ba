"""A sampling profiler for any Python process with this folder on its PYTHONPATH, except multiprocessing children.

The stack is counted once in each millisecond of CPU time; SIGUSR1 writes the counts to $SAMPLES/PID.json and starts
anew. A timer of CPU time costs an idle process nothing, and leaves the shares of C and Python code unchanged.
"""

import json
import os
import signal
import sys
from collections import Counter
from types import FrameType

PERIOD_S = 0.001
own: Counter[str] = Counter()  # samples in the function itself, or in C code called by the function
within: Counter[str] = Counter()  # samples in the function or below it


def name(frame: FrameType) -> str:
    code = frame.f_code
    return f"{'/'.join(code.co_filename.split('/')[-3:])}:{code.co_firstlineno} {code.co_qualname}"


def sample(number: int, frame: FrameType | None) -> None:
    if frame is None:
        return
    own[name(frame)] += 1
    stack = set()
    while frame:
        stack.add(name(frame))
        frame = frame.f_back
    within.update(stack)


def write(number: int, frame: FrameType | None) -> None:
    global own, within
    (own, own_taken), (within, within_taken) = (Counter(), own), (Counter(), within)  # a sample may come any time
    draft = f"{os.environ['SAMPLES']}/{os.getpid()}.draft"
    with open(draft, "w") as file:
        samples = sum(own_taken.values())
        json.dump({"samples": samples, "own": own_taken.most_common(), "within": within_taken.most_common()}, file)
    os.replace(draft, draft.replace(".draft", ".json"))


if "SAMPLES" in os.environ and "multiprocessing" not in " ".join(sys.orig_argv):
    signal.signal(signal.SIGUSR1, write)
    signal.signal(signal.SIGPROF, sample)
    signal.setitimer(signal.ITIMER_PROF, PERIOD_S, PERIOD_S)
