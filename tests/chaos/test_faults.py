"""After a fault a platform serves again without help, and bills exactly the tokens that clients got.

`python -m tests.chaos.faults` times the recovery for the table in README.md; the test asks only for a recovery."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.faults import Fault, Outcome, all_faults, full_disk, outcomes

SHORT = 0.3  # share of the seconds that faults last in tests.chaos.faults
FEW = ("disk full", "JetStream's folder deleted", "SQLite locked", "SIGKILL ledger", "SIGSTOP nats")


async def tried(folder: Path, faults: dict[str, Fault]) -> list[Outcome]:
    """Skips the test where the disk can't be filled."""
    found = [outcome async for outcome in outcomes(folder, faults)]
    if sentences := [outcome for outcome in found if isinstance(outcome, str)]:
        pytest.skip(sentences[0])
    return [outcome for outcome in found if isinstance(outcome, Outcome)]


def check(outcome: Outcome) -> None:
    print(outcome.row())
    assert outcome.served_s is not None, f"{outcome.fault}: it did not serve again"
    assert outcome.flaws == [], outcome.fault


@pytest.mark.timeout(900)
async def test_a_platform_comes_to_itself_after_some_faults_with_its_bill_right(tmp_path: Path) -> None:
    faults = {name: fault for name, fault in all_faults(SHORT).items() if name in FEW}
    faults["disk full"] = Fault(full_disk(4), needs_small_disk=True)
    found = await tried(tmp_path, faults)
    assert len(found) == len(FEW)
    for outcome in found:
        check(outcome)
    (full,) = [outcome for outcome in found if outcome.fault == "disk full"]
    refused = [seen for seen in full.history if "disk_full" in seen.error]
    assert refused and all(seen.status == 503 and "MiB free" in seen.error for seen in refused)


@pytest.mark.long
@pytest.mark.timeout(3600)
async def test_a_platform_comes_to_itself_after_every_fault_with_its_bill_right(tmp_path: Path) -> None:
    for outcome in await tried(tmp_path, all_faults()):
        check(outcome)
