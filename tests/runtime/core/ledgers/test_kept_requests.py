"""Kept requests: every token since the start, for the owner alone, within the bounds of the tenant."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.core.ledgers import kept_requests
from runtime.core.ledgers.kept_requests import KeptRequests
from store.contract.wire import Delta, Finish, Resumable, Run

OWNER = b"acme"


def run(request: str, tenant: str = "acme", resumable: bool = True, stream: int = 1) -> Run:
    return Run(
        gateway="g",
        stream=stream,
        model="m",
        request=request,
        attempt=1,
        prompt_tokens=3,
        max_tokens=9,
        payload=b"",
        engine="e",
        tenant=tenant,
        resumable=Resumable(OWNER, b"body", 10.0) if resumable else None,
    )


def test_a_request_is_kept_with_all_tokens_and_its_end() -> None:
    kept, asked, at = KeptRequests(), run("q"), ("g", 1)
    kept.begin(asked, at, [1, 2])
    asked = kept.hear(asked, at, Delta(1, [3], 2))
    kept.end(asked, at, Delta(1, [4], 3, Finish.LENGTH), now=5.0)
    found = kept.find("q", OWNER, "m")
    assert found is not None
    made = found.made(8)
    assert (made.stream, made.tokens, made.at, made.finish) == (8, [1, 2, 3, 4], 0, Finish.LENGTH)
    kept.sweep(15.0)
    assert len(kept) == 1
    kept.sweep(15.1)
    assert len(kept) == 0


@pytest.mark.parametrize(
    ("request_id", "owner", "model"), [("other", OWNER, "m"), ("q", b"globex", "m"), ("q", OWNER, "n")]
)
def test_another_owner_learns_nothing(request_id: str, owner: bytes, model: str) -> None:
    kept = KeptRequests()
    kept.begin(run("q"), ("g", 1), [])
    assert kept.find("q", OWNER, "m") is not None
    assert kept.find(request_id, owner, model) is None


def test_what_the_first_delta_says_of_the_prompt_travels_with_the_run() -> None:
    kept, at = KeptRequests(), ("g", 1)
    kept.begin(run("q"), at, [])
    heard = kept.hear(run("q"), at, Delta(1, [7], 0, cached_tokens=5, written_tokens=6))
    assert heard.resumable is not None
    assert (heard.resumable.cached_tokens, heard.resumable.written_tokens) == (5, 6)


def test_words_of_an_earlier_stream_change_nothing_once_the_request_was_taken() -> None:
    kept, first, second = KeptRequests(), ("g", 1), ("h", 9)
    kept.begin(run("q"), first, [1])
    assert kept.take("q", second).at == second
    kept.hear(run("q"), first, Delta(1, [2], 1))
    kept.end(run("q"), first, Delta(1, [], 1, Finish.ERROR), 0.0)
    kept.forget(run("q"), first)
    found = kept.find("q", OWNER, "m")
    assert found is not None and found.end is None and list(found.tokens) == [1]
    mark = found.run.resumable
    assert mark is not None and mark.taken == 1


def test_a_request_that_no_client_can_resume_is_not_kept() -> None:
    kept, asked = KeptRequests(), run("q", resumable=False)
    kept.begin(asked, ("g", 1), [1])
    assert kept.hear(asked, ("g", 1), Delta(1, [2], 1)) is asked and len(kept) == 0


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 9), st.integers(0, 60), st.booleans(), st.booleans()),
        max_size=60,
    )
)
def test_ended_requests_of_a_tenant_stay_within_the_bounds(steps: list[tuple[str, int, int, bool, bool]]) -> None:
    kept, opened = KeptRequests(), dict[str, Run]()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kept_requests, "REQUESTS_MOST", 4)
        patched.setattr(kept_requests, "TOKENS_MOST", 100)
        for now, (tenant, number, tokens, ends, forgets) in enumerate(steps):
            name = f"{tenant}{number}"
            asked = opened.setdefault(name, run(name, tenant))
            if name not in kept._kept:
                kept.begin(asked, ("g", 1), [])
            if ends:
                kept.end(asked, ("g", 1), Delta(1, [7] * tokens, 0, Finish.STOP), float(now))
            elif forgets:
                kept.forget(asked, ("g", 1))
            kept.sweep(float(now))
            for each, ended in kept._ended.items():
                assert 0 < len(ended.by_id) <= 4 and ended.tokens <= 100
                assert ended.tokens == sum(len(request.tokens) for request in ended.by_id.values())
                assert all(kept._kept[id] is request for id, request in ended.by_id.items()), each
    kept.sweep(1e9)
    assert not kept._ended and all(request.end is None for request in kept._kept.values())
