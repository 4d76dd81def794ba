"""Messages with which a gateway takes up a request that a runtime keeps for a client without a connection. Pure."""

from __future__ import annotations

from store.contract.wire import Delta, Message, Resumable

TAKEN_MOST = 1000  # times that a request can be taken up


def resume_subject(runtime: str) -> str:
    """Subject on which a runtime takes requests of Resume and answers ResumeAnswer."""
    return f"rt.{runtime}.resume"


class Resume(Message, frozen=True, kw_only=True, tag="Resume"):
    """Question of a gateway whether the runtime keeps a request, or the wish to go on with the request."""

    gateway: str
    request: str
    owner: bytes  # digest of tenant and key; see Resumable
    model: str  # EngineSpec.key
    stream: int = 0  # number of the stream at the gateway from now on; 0: the gateway only asks


class ResumeAnswer(Message, frozen=True, kw_only=True, tag="ResumeAnswer"):
    """Answer to Resume. Without `resumable`, the runtime keeps no such request of that owner, or can't part with the
    request now."""

    resumable: Resumable | None = None
    attempt: int = 0  # at the request, as in Run
    tokens: int = 0  # made so far
    ended: bool = False
    epoch: int = 0
    seq: int = 0  # number of the last frame sent to the gateway
    made: Delta | None = None  # everything made since the request's start; set if the gateway named a stream
