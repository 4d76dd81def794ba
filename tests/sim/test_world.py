"""A simulated fleet whose devices die, hang, join and leave while requests move: no request is lost or made twice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from runtime.core.device.request import ModelKey, Objective, Request, request_id
from runtime.core.fleet.cluster import Rules
from runtime.core.fleet.scaling import Band
from runtime.core.ledgers.costs import ImageTiers, ModelSize, load_profile
from runtime.core.turns.slack import Slack
from runtime.sim.device import CHECK_STEPS
from runtime.sim.dispatch.base import Dispatch
from runtime.sim.dispatch.baselines import Freest, InTurns
from runtime.sim.dispatch.gateways import GatewayDispatch
from runtime.sim.dispatch.sight import Sight
from runtime.sim.workload import RESTART_S, SILENT_S, InjectedFault, Workload, base, drawn, with_burst
from runtime.sim.world import SimulationResult, World
from tests.sim.small import COSTS, PAGE, profile

ROOT = Path(__file__).parents[2]


def work(at_s: list[float], prompts: list[int], outputs: list[int], models: int = 1) -> Workload:
    count = len(at_s)
    return Workload(
        models=[ModelSize(f"m{index}", COSTS.weight_bytes, COSTS.kv_bytes_per_token, 1e6) for index in range(models)],
        rates=[count / models] * models,
        duration_s=at_s[-1] + 1.0,
        at_s=np.array(at_s),
        model=np.arange(count, dtype=np.int32) % models,
        prompt_tokens=np.array(prompts, np.int32),
        output_tokens=np.array(outputs, np.int32),
    )


def drawn_work(seed: int, requests: int, duration_s: float, models: int = 1) -> Workload:
    """Work with a long tail of lengths."""
    rng = np.random.default_rng(seed)
    at_s = np.sort(rng.random(requests) * duration_s).tolist()
    lengths = np.minimum(rng.pareto(1.2, (2, requests)) * 40 + 8, 500).astype(int).tolist()
    return work(at_s, lengths[0], lengths[1], models)


def fleet(
    workload: Workload,
    devices: int = 2,
    dispatch: Dispatch | None = None,
    pages: int = 40,
    rules: Rules | None = None,
    faults: list[InjectedFault] | None = None,
    drain_s: float = 300.0,
) -> World:
    """A world after its end, with checks at every event."""
    dispatch = dispatch or InTurns()
    world = World(
        workload, profile(pages), Slack, dispatch, devices, Objective(), checks=True, rules=rules, faults=faults or ()
    )
    world.run(drain_s)
    world.check()
    return world


def made(world: World) -> list[int]:
    return [request.sent for request in world.requests]


@pytest.mark.parametrize("seed", range(4))
def test_images_beyond_the_host_cache_come_from_disk_and_every_request_is_served(seed: int) -> None:
    workload, small = drawn_work(seed, 120, 120.0, 6), profile(40)
    first_s = dict[int, float]()
    for images in (6, 3):  # room in the host cache, of 6 images of 8 pages
        tiers = ImageTiers(host_cache_bytes=images * 8 * PAGE, disk_bytes_per_s=8 * PAGE / 0.2)
        world = World(workload, replace(small, tiers=tiers), Slack, InTurns(), 1, Objective(), checks=True)
        world.run(600.0)
        world.check()
        assert made(world) == workload.output_tokens.tolist()
        waits = [request.progress.first_at - request.arrived_at for request in world.requests]
        first_s[images] = sum(waits)
    assert first_s[3] > first_s[6] + 1.0, "images that come from disk take longer"


def rhythmic(period_s: float, requests: int, models: int = 4) -> Workload:
    """Every model is asked in one rhythm, one model after another."""
    at_s = [period_s * (at // models) + period_s / models * (at % models) for at in range(requests)]
    return work(at_s, [64] * requests, [4] * requests, models)


def test_images_come_up_before_requests_that_come_in_a_rhythm() -> None:
    """The host cache has room for three of four images, so without staging every request waits for the disk."""
    workload, first_s, results = rhythmic(80.0, 60), dict[bool, float](), dict[bool, SimulationResult]()
    for by_history in (False, True):
        tiers = ImageTiers(
            host_cache_bytes=3 * 8 * PAGE, disk_bytes_per_s=8 * PAGE / 0.5, close_s=0.05, by_history=by_history
        )
        world = World(workload, replace(profile(10), tiers=tiers), Slack, InTurns(), 1, Objective(), checks=True)
        world.run(600.0)
        world.check()
        assert made(world) == workload.output_tokens.tolist()
        first_s[by_history] = float(np.median([r.progress.first_at - r.arrived_at for r in world.requests]))
        results[by_history] = world.result(0.0)
    assert first_s[False] > 0.5 > 0.2 > first_s[True]
    told = results[True]
    assert isinstance(told.staged, int) and isinstance(told.staged_unused, int)
    assert told.staged > 10 and told.staged_unused <= 2


def test_the_first_fetches_of_a_model_are_checked_on_a_device_that_has_to_prove_the_model() -> None:
    """The host cache has room for one of four images: each request waits for a fetch. A new engine is asked twice."""
    workload, first_s = rhythmic(80.0, 16), dict[int | None, list[float]]()
    for fetched in (None, 1, 3):
        tiers = ImageTiers(host_cache_bytes=8 * PAGE, disk_bytes_per_s=8 * PAGE / 0.2, fetched=fetched)
        world = World(workload, replace(profile(10), tiers=tiers), Slack, InTurns(), 1, Objective(), checks=True)
        world.run(600.0)
        world.check()
        first_s[fetched] = [request.progress.first_at - request.arrived_at for request in world.requests]
    check_s = 2 * (COSTS.prefill(16) + CHECK_STEPS * COSTS.step(1, 24))
    assert first_s[1] == pytest.approx([wait_s + check_s for wait_s in first_s[None][:8]] + first_s[None][8:])
    assert first_s[3] == pytest.approx(first_s[None])


def test_without_images_on_disk_results_say_nothing_about_them() -> None:
    told = World(rhythmic(10.0, 8), profile(40), Slack, InTurns(), 1, Objective())
    told.run(60.0)
    assert {"disk_loads_per_min", "staged", "staged_unused"}.isdisjoint(to_builtins(told.result(0.0)))


ONE_BY_ONE = Rules(migrate=True, whole=False)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("whole", [False, True])
def test_whatever_fails_all_requests_end_with_all_their_tokens(seed: int, whole: bool) -> None:
    models = 6 if whole else 1
    workload = drawn_work(seed, 120, 60.0, models)
    dispatch: Dispatch = GatewayDispatch() if whole else Freest()
    rules = Rules(migrate=True, whole=whole, band=Band(2, 5, cooldown_s=3.0))
    world = fleet(workload, 3, dispatch, 24, rules, drawn(8, 4, 60.0, seed))
    assert made(world) == workload.output_tokens.tolist()
    assert world.resumed > 0


def test_a_request_that_moves_pauses_only_for_its_last_copy() -> None:
    """Two long requests on one device, in turns; the second device is idle once the short request has ended."""
    workload = work([0.0, 0.1, 0.2], [64, 8, 64], [1200, 2, 1200])
    alone, moving = fleet(workload, pages=42), fleet(workload, pages=42, rules=ONE_BY_ONE)
    assert alone.moves.done == 0 and moving.moves.done == 1
    assert made(moving) == made(alone)
    ends = [[request.progress.last_at for request in world.requests] for world in (alone, moving)]
    assert max(ends[1]) < max(ends[0])
    assert moving.result(0.0).token_attainment == 1.0


def test_who_waits_for_room_goes_where_there_is_some() -> None:
    """Prompts of ten and thirty pages: beside the first request, the last does not fit; in turns the last would
    wait."""
    workload = work([0.0, 0.1, 0.2], [640, 8, 1800], [1000, 2, 2])
    alone, moving = fleet(workload), fleet(workload, rules=ONE_BY_ONE)
    first_s = [world.requests[2].progress.first_at for world in (alone, moving)]
    assert first_s[1] < 3.0 < 10.0 < first_s[0]


def test_what_a_dead_device_made_is_not_made_again_and_goes_on_elsewhere() -> None:
    workload = work([0.0, 0.0], [64, 64], [300, 300])
    whole, faulty = fleet(workload), fleet(workload, faults=[InjectedFault(2.0, 0, "dies")])
    assert made(faulty) == [300, 300]
    assert faulty.resumed == 1
    late_s = [world.requests[0].progress.last_at for world in (whole, faulty)]
    recomputed_s = COSTS.prefill(64 + 300)
    assert late_s[0] < late_s[1] < late_s[0] + recomputed_s + 1.0


def test_a_device_that_hangs_is_given_up_when_it_is_silent_for_long() -> None:
    workload = work([0.0, 0.0], [64, 64], [300, 300])
    dead, silent = (fleet(workload, faults=[InjectedFault(2.0, 0, kind)]) for kind in ("dies", "hangs"))
    ends = [world.requests[0].progress.last_at for world in (dead, silent)]
    assert ends[1] == pytest.approx(ends[0] + SILENT_S, abs=0.5)


def test_while_no_device_is_there_requests_wait_for_one() -> None:
    workload = work([0.0, 5.0], [64, 64], [400, 10])
    world = fleet(workload, 1, faults=[InjectedFault(1.0, 0, "dies")])
    assert made(world) == [400, 10]
    assert world.requests[1].progress.first_at > 1.0 + RESTART_S


def test_a_move_that_does_not_arrive_leaves_the_request_where_it_was() -> None:
    workload = work([0.0, 0.1, 0.2], [64, 8, 64], [1200, 2, 1200])
    faults = [InjectedFault(0.0, 0, "drops")] * 1000
    world = fleet(workload, pages=42, rules=ONE_BY_ONE, faults=faults)
    assert world.moves.done == 0 < world.moves.given_up
    assert made(world) == [1200, 2, 1200]


def test_a_model_moves_whole_to_a_device_with_time_for_it() -> None:
    """Two of three models share a device, and get many requests."""
    count = 150
    at_s = [0.0, 0.0, 0.0, *(2.0 + each / 15 for each in range(count))]
    workload = work(at_s, [8] * len(at_s), [600] * 3 + [600, 2, 600] * (count // 3), models=3)
    rules = Rules(migrate=True)
    alone, moving = (fleet(workload, 2, GatewayDispatch(), 1000, each) for each in (None, rules))
    assert moving.moves.done > 0
    assert moving.result(0.0).min > alone.result(0.0).min


def test_a_burst_on_a_model_is_spread_by_moving_some_of_its_requests() -> None:
    """By dispatch alone, requests of the burst grow beyond the memory of the device of each request."""
    alone, moving = (made_in_a_burst(rules) for rules in (None, Rules(migrate=True)))
    assert moving.moves > 50 and moving.finished == 1.0
    assert moving.token_attainment > alone.token_attainment + 0.1


def made_in_a_burst(rules: Rules | None) -> SimulationResult:
    path = ROOT / "deploy/profiles/h100.json"
    workload, dispatch = with_burst(base(8, 4, duration_s=90.0), 450, 30.0, 4), GatewayDispatch(Sight(2, seed=4))
    profile = load_profile(path.read_bytes(), str(path))
    world = World(workload, profile, Slack, dispatch, 4, Objective(), rules=rules, checks=rules is not None)
    world.run(60.0)
    return world.result(20.0)


def test_a_fleet_grows_and_shrinks_with_its_load_and_is_paid_for_as_long_as_it_is_there() -> None:
    busy = drawn_work(1, 400, 60.0)
    calm = [60.0 + 4 * each for each in range(60)]
    lengths = [[*column.tolist(), *[16] * len(calm)] for column in (busy.prompt_tokens, busy.output_tokens)]
    workload = work([*busy.at_s.tolist(), *calm], *lengths)
    world = fleet(workload, 1, Freest(), 24, Rules(migrate=True, whole=False, band=Band(1, 6)))
    assert made(world) == workload.output_tokens.tolist()
    assert len(world.devices) > 1
    assert sum(device.there for device in world.cluster.devices) == 1
    result = world.result(0.0)
    assert workload.duration_s / 3600 < result.gpu_hours < len(world.devices) * workload.duration_s / 3600
    assert 0 < result.held_hours < result.whole_hours < result.gpu_hours


def test_what_running_requests_hold_is_counted_while_they_come() -> None:
    """Two requests of 300 tokens and more, on a device each, until the last request comes."""
    duration_s, pages = 200.0, 10_000
    workload = work([0.0, 0.0, duration_s], [300, 300, 8], [30_000] * 2 + [2])
    result = fleet(workload, 2, pages=pages, rules=ONE_BY_ONE, drain_s=1000.0).result(0.0)
    tokens = 300 + duration_s / COSTS.step(1, 0) / 2  # in the mean over the duration
    room = (pages - COSTS.weight_bytes / PAGE) * PAGE / COSTS.kv_bytes_per_token
    assert result.held_hours * 3600 == pytest.approx(2 * duration_s * tokens / room, rel=0.03)


def test_who_is_leaving_is_called_back_before_another_is_waited_for() -> None:
    """With one of three long requests, a device was to leave; then more requests come than fit on the second device."""
    workload = work([0.0, 0.1, 0.2, *[20.0] * 24], [*[8] * 3, *[400] * 24], [*[2500] * 3, *[300] * 24])
    rules = Rules(whole=False, band=Band(1, 6))
    world, serving = World(workload, profile(100), Slack, InTurns(), 2, Objective(), checks=True, rules=rules), []
    for at_s in (5.0, 19.0, 25.0):
        world.at(at_s, lambda _: serving.append([device.serves for device in world.cluster.devices]), None)
    world.run(300.0)
    assert serving == [[True, True], [True, False], [True, True]]
    assert made(world) == workload.output_tokens.tolist()


def test_who_waits_is_named_in_the_order_in_which_they_came() -> None:
    world = World(work([0.0], [8], [2]), profile(24), Slack, InTurns(), 1, Objective())
    for stream, at_s in enumerate((3.0, 1.0, 2.0)):
        world.devices[0].arrive(
            Request(request_id("", stream), "", stream, ModelKey("m0"), b"", at_s, 8, 2, Objective(), ModelKey("m0"))
        )
    assert [usage.request for usage in world.devices[0].usages()] == [request_id("", each) for each in (1, 2, 0)]


def test_without_changes_all_devices_are_paid_for() -> None:
    workload = drawn_work(1, 40, 60.0)
    assert fleet(workload, 3).result(0.0).gpu_hours == pytest.approx(3 * workload.duration_s / 3600)


def test_faults_are_a_function_of_their_seed() -> None:
    assert drawn(20, 4, 60.0, 1) == drawn(20, 4, 60.0, 1) != drawn(20, 4, 60.0, 2)
    assert {fault.kind for fault in drawn(50, 4, 60.0, 1)} == {"dies", "hangs", "drops"}
    assert all(0 <= fault.device < 4 and 0 <= fault.at_s < 60.0 for fault in drawn(50, 4, 60.0, 1))
