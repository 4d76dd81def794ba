"""Process of `staccato sim`, `staccato plan` and the replay of a journal: takes arguments, prints a table or JSON."""

from __future__ import annotations

import argparse
import math
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from runtime.core.device.request import Objective
from runtime.core.ledgers.costs import ImageTiers, Profile, load_profile
from runtime.core.ledgers.overlap import CONTEXT, PROMPT, step_pairs
from runtime.sim.capacity import CapacityRun, Measure, Point, Scenario, Search, Tuning, processes
from runtime.sim.compiled import start_again
from runtime.sim.dispatch.sight import AS_GATEWAYS_SEE, Sight
from runtime.sim.fleet import DISPATCHES, FLEETS, Changes, check, simulate
from runtime.sim.plan import Question, as_it_is, plan, read_sizes
from runtime.sim.replay import of_a_dispatcher, replay, replay_choices
from runtime.sim.report import LaneSpan, attainment_svg, chrome_trace, timeline_svg
from runtime.sim.trace import read_lengths, read_trace, read_windows
from runtime.sim.workload import LENGTHS, Workload, base, divided, flooded, prioritised, replicated, servegen
from runtime.sim.world import SimulationResult
from store.contract.reports import period_s

PROFILES = Path(__file__).parents[2] / "deploy" / "profiles"
USAGE = 2
DISK_GB_S, BUILD_S = 2.0, 0.1
MEASURES: dict[str, Measure] = {"min": "min", "token": "token_attainment"}


class Parser(argparse.ArgumentParser):
    """Argument parser that prints a single error sentence instead of the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"error: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = understood()
    chosen = parser.parse_args(arguments)
    try:
        chosen.command(chosen)
    except (ValueError, OSError) as error:
        parser.exit(USAGE, f"error: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130)


def understood() -> Parser:
    parser = Parser(prog="staccato", description="Simulations of fleets of GPUs.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _sim_options(commands.add_parser("sim", help="simulate a fleet, or search how many models a GPU serves"))
    _plan_options(commands.add_parser("plan", help="how many GPUs the workload of a trace needs"))
    _replay_options(commands.add_parser("replay", help="decide again what a runtime decided, from its journal"))
    return parser


# ── staccato sim ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _sim_options(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("--workload", default="base", metavar="base|FILE", help="synthetic, or a trace with columns t,model,inp,out")
    option("--servegen", nargs=2, type=Path, metavar=("WINDOWS", "LENGTHS"), help="models asked as ServeGen's clients")
    option("--rate", type=_positive, help="requests per second and model, of base and servegen [0.1]")
    option("--duration", type=_seconds, help="of the workload [base 400s, servegen 600s, a trace as long as it is]")
    option("--lengths", choices=LENGTHS, help="tokens of prompts and outputs, of base [sharegpt]")
    option("--cv", type=_positive, help="of gaps between requests, of base [1]")
    option("--zipf", type=float, help="exponent of the models' popularity, of base [0: all equal]")
    option("--tenants", type=_weights, metavar="W,W…", help="their weights: they have the models in turns [one tenant]")
    option("--same-models", action="store_true", help="they have all models together")
    option("--flood", type=_count, default=1, metavar="TIMES", help="the first tenant asks so many times as often")
    option("--priority-share", type=_share, metavar="SHARE", help="of the requests have high priority [none]")
    option("--models-per-gpu", type=_positive, default=11.0, metavar="N", help="[%(default)g]")
    option("--gpus", type=_count, default=8, help="[%(default)s]")
    option("--gpu", type=_profile, default="h100", metavar="NAME|FILE", help="a profile [%(default)s]")
    _fleet_options(parser)
    option("--set", type=_setting, action="append", default=[], metavar="NAME=VALUE", help="tune the policy")
    option("--seed", type=_seed, default=7, help="[%(default)s]")
    option("--dispatch", choices=DISPATCHES, default="", help="who takes a request [as the policy has it]")
    option("--migrate", action="store_true", help="requests move from full devices to free ones while they run")
    option("--scale", type=_range, metavar="MIN:MAX", help="GPUs join and leave with the load, from --gpus on")
    option("--faults", type=_count, default=0, metavar="N", help="so many times a GPU dies or hangs, or a move fails")
    option("--check", action="store_true", help="check after every event that the books are right")
    option("--picture-until", type=_seconds, help="of a single run [until the last token]")
    option("--chrome-trace", type=Path, metavar="FILE", help="who held each GPU when, for a trace viewer")
    option("--capacity", type=_share, metavar="SHARE", help="search the most models per GPU with that attainment")
    option("--by", choices=MEASURES, default="min", help="what --capacity asks for: of tokens, or of first ones too")
    option("--seeds", type=_count, default=3, help="of a search, from --seed on [%(default)s]")
    option("--overlap", action="store_true", help="what two models at once on --gpu could be worth at most, and no run")
    parser.set_defaults(command=_sim)


def _sim(chosen: argparse.Namespace) -> None:
    if chosen.overlap:
        _tell(_overlap(chosen.gpu), chosen.json)
        return
    objective = Objective(chosen.ttft, chosen.tbt)
    if chosen.picture_until and not chosen.picture:
        raise ValueError("--picture-until says where a picture ends: say --picture FILE.svg")
    if (chosen.same_models or chosen.flood > 1) and not chosen.tenants:
        raise ValueError("--same-models and --flood are about several tenants: say --tenants 1,1")
    scenario = Scenario(
        _workload(chosen), _with_tiers(chosen, chosen.gpu), chosen.policy, chosen.gpus, objective, _sight(chosen)
    )
    tuning: Tuning = tuple(chosen.set)
    check(chosen.policy, **dict(tuning))
    changed = _changes(chosen) != Changes(seed=chosen.seed, sight=scenario.sight)
    if chosen.capacity is None:
        _sim_once(chosen, scenario, tuning)
    elif (
        chosen.tenants
        or chosen.priority_share
        or chosen.check
        or chosen.chrome_trace
        or chosen.picture_until
        or tuning
        or changed
    ):
        raise ValueError(
            "--capacity makes many runs of one policy and tunes it itself: leave out --tenants, --priority-share, "
            "--check, --chrome-trace, --picture-until, --set, --dispatch, --migrate, --scale and --faults"
        )
    else:
        _sim_capacity(chosen, scenario)


def _with_tiers(chosen: argparse.Namespace, profile: Profile) -> Profile:
    """The profile with the tiers below the device. Raises ValueError for an option of a tier without --host-cache, so
    that no option is silently ignored."""
    if not chosen.host_cache:
        for name in ("disk", "host_cache_free", "build", "stage"):
            if getattr(chosen, name):
                option = name.replace("_", "-")
                raise ValueError(f"--{option} is about images on disk: say with --host-cache how many stay in memory")
        return profile
    tiers = ImageTiers(
        host_cache_bytes=round(chosen.host_cache * (1 << 30) * (1 - (chosen.host_cache_free or 0.0))),
        disk_bytes_per_s=(chosen.disk or DISK_GB_S) * 1e9,
        build_s=BUILD_S if chosen.build is None else chosen.build,
        by_history=chosen.stage,
    )
    return msgspec.structs.replace(profile, tiers=tiers)


def _fleet_options(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("--policy", default="slack", metavar="|".join(FLEETS), help="[%(default)s]")
    option("--ttft", type=_seconds, default=10.0, help="when the first token is due [10s]")
    option("--tbt", type=_seconds, default=0.1, help="between two tokens [100ms]")
    option("--gateways", type=_count, help=f"gateways that choose GPUs for requests [{AS_GATEWAYS_SEE.gateways}]")
    option("--report-period", type=_seconds, help="between two reports of a GPU [as nodes do: 250ms to 1s]")
    option("--host-cache", type=_positive, metavar="GIB", help="for images, of each GPU [room for all]")
    option("--host-cache-free", type=_part, metavar="SHARE", help="of it for parked requests and prefixes [0]")
    option("--disk", type=_positive, metavar="GB/S", help="reads images that leave the host cache [2]")
    option("--build", type=_seconds, metavar="TIME", help="to make an engine around an image from disk [100ms]")
    option("--stage", action="store_true", help="images come up from disk before requests, by their history")
    option("--exact", action="store_true", help="a single gateway, which sees every GPU as the GPU is")
    option(
        "--picture", type=Path, metavar="FILE.svg", help="attainment by load; of a single run who held each GPU when"
    )
    option("--json", action="store_true")


def _sim_once(chosen: argparse.Namespace, scenario: Scenario, tuning: Tuning) -> None:
    models = max(1, round(chosen.models_per_gpu * chosen.gpus))
    workload = scenario.workload(models, chosen.seed)
    if chosen.tenants:
        workload = divided(workload, chosen.tenants, chosen.seed, chosen.same_models)
        workload = flooded(workload, chosen.flood, chosen.seed)
    if chosen.priority_share:
        workload = prioritised(workload, chosen.priority_share, chosen.seed)
    spans: list[LaneSpan] | None = [] if chosen.chrome_trace or chosen.picture else None
    settings: dict[str, Any] = dict(tuning)
    began = time.perf_counter()
    result = simulate(
        workload,
        scenario.profile,
        scenario.policy,
        scenario.gpus,
        scenario.objective,
        spans,
        chosen.check,
        changes=_changes(chosen),
        **settings,
    )
    took_s = time.perf_counter() - began
    if chosen.chrome_trace:
        chosen.chrome_trace.write_bytes(chrome_trace(spans or ()))
    if chosen.picture:
        title = f"{chosen.policy}: who held each GPU"
        chosen.picture.write_text(timeline_svg(spans or (), title=title, until_s=chosen.picture_until))
    told = msgspec.to_builtins(result) | {"models": models, "events_per_s": round(result.events / took_s)}
    told["tenants"] = [{"tenant": name} | msgspec.to_builtins(kept) for name, kept in result.tenants.items()]
    told["priorities"] = [{"priority": word} | msgspec.to_builtins(kept) for word, kept in result.priorities.items()]
    if chosen.dispatch:
        told["dispatch"] = chosen.dispatch
    _tell(_asked(chosen) | told, chosen.json)


def _overlap(profile: Profile) -> dict[str, object]:
    """What steps of two models at once could be worth. Raises ValueError for a profile without a law."""
    if profile.law is None:
        raise ValueError(f"profile {profile.name!r} has no law of costs: name one that has, as h100")
    steps = [pair._asdict() for pair in step_pairs(profile.law)]
    return {"gpu": profile.name, "profile": profile.kind, "context": CONTEXT, "prompt": PROMPT, "steps": steps}


def _changes(chosen: argparse.Namespace) -> Changes:
    if chosen.scale and not chosen.scale[0] <= chosen.gpus <= chosen.scale[1]:
        raise ValueError(
            f"--scale {chosen.scale[0]}:{chosen.scale[1]} leaves out --gpus {chosen.gpus}, where it begins"
        )
    return Changes(chosen.dispatch, chosen.migrate, chosen.scale, chosen.faults, chosen.seed, _sight(chosen))


def _sight(chosen: argparse.Namespace) -> Sight:
    """Raises ValueError for --exact with options of the reports, so that no option is silently ignored."""
    if not chosen.exact:
        gpus = chosen.gpus if isinstance(chosen.gpus, int) else 1  # `plan` looks for the number
        gateways, every_s = chosen.gateways or AS_GATEWAYS_SEE.gateways, chosen.report_period or period_s(gpus)
        return Sight(gateways, every_s, seed=getattr(chosen, "seed", AS_GATEWAYS_SEE.seed))
    if chosen.gateways or chosen.report_period:
        raise ValueError("--exact needs no reports: leave out --gateways and --report-period")
    return Sight(exact=True)


def _sim_capacity(chosen: argparse.Namespace, scenario: Scenario) -> None:
    measure = MEASURES[chosen.by]
    with processes() as each:
        search = Search(scenario, range(chosen.seed, chosen.seed + chosen.seeds), each, _Counted())
        found = search.capacity(measure, chosen.capacity)
    if sys.stderr.isatty():
        print("\r", end="", file=sys.stderr)
    curve = search.curve(measure)
    if chosen.picture:
        points = [(point.models_per_gpu, point.attained) for point in curve]
        chosen.picture.write_text(attainment_svg({chosen.policy: points}, (chosen.capacity,)))
    told = {
        "models_per_gpu": found,
        "attainment": chosen.capacity,
        "by": chosen.by,
        "seeds": chosen.seeds,
        "curve": [_point(point) for point in curve],
    }
    _tell(_asked(chosen) | told, chosen.json)


class _Counted(dict[CapacityRun, SimulationResult]):
    """Results of a search by run; shows the progress of the search if stderr is a terminal."""

    def __setitem__(self, run: CapacityRun, result: SimulationResult) -> None:
        super().__setitem__(run, result)
        if sys.stderr.isatty():
            print(f"\r{len(self)} runs, {run.models} models …", end="", file=sys.stderr, flush=True)


def _asked(chosen: argparse.Namespace) -> dict[str, object]:
    """Settings of a simulation, printed with its figures."""
    workload = "servegen" if chosen.servegen else chosen.workload
    return {
        "workload": workload,
        "policy": chosen.policy,
        "gpus": chosen.gpus,
        "gpu": chosen.gpu.name,
        "profile": chosen.gpu.kind,
        "ttft_s": chosen.ttft,
        "tbt_s": chosen.tbt,
        "seed": chosen.seed,
        **_seen(chosen),
    }


def _seen(chosen: argparse.Namespace) -> dict[str, object]:
    """What gateways see: exact, or a number of gateways and the seconds between two reports."""
    sight = _sight(chosen)
    return {"exact": True} if sight.exact else {"gateways": sight.gateways, "report_period_s": sight.period_s}


def _point(point: Point) -> dict[str, object]:
    return {
        "models_per_gpu": point.models_per_gpu,
        "attained": point.attained,
        "by_seed": point.by_seed,
        "tuning": dict(point.tuning),
    }


# ── staccato plan ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _plan_options(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("--trace", type=Path, required=True, metavar="FILE", help="with columns t,model,inp,out: CSV or parquet")
    option("--gpus", type=_kind_and_count, required=True, metavar="NAME:COUNT", help="at most so many, as h200:4")
    option(
        "--sizes", type=Path, metavar="FILE", help="of the models, JSON or CSV [6 to 14 billion parameters in turns]"
    )
    _fleet_options(parser)
    option("--attainment", type=_share, default=0.99, help="of tokens and of first tokens [%(default)g]")
    parser.set_defaults(command=_plan)


def _plan(chosen: argparse.Namespace) -> None:
    kind, gpus_most = chosen.gpus
    profile = _with_tiers(chosen, kind)
    sizes = read_sizes(chosen.sizes) if chosen.sizes else None
    workload = as_it_is(read_trace(chosen.trace), sizes)
    check(chosen.policy)
    question = Question(workload, profile, chosen.policy, Objective(chosen.ttft, chosen.tbt), _sight(chosen))
    with processes() as each:
        answer = plan(question, gpus_most, chosen.attainment, each)
    if chosen.picture:
        # Models per GPU, as in every picture of attainment: fewer GPUs stand further right.
        curve = [(len(workload.models) / gpus, result.min) for gpus, result in enumerate(answer.results, start=1)]
        chosen.picture.write_text(attainment_svg({chosen.policy: curve}, (chosen.attainment,)))
    told: dict[str, object] = {
        "trace": str(chosen.trace),
        "models": len(workload.models),
        "requests": len(workload.at_s),
        "sizes": str(chosen.sizes) if chosen.sizes else "assumed: 6, 7, 7, 8, 9, 13 and 14 billion parameters in turns",
        "policy": chosen.policy,
        "gpu": profile.name,
        "profile": profile.kind,
        "ttft_s": chosen.ttft,
        "tbt_s": chosen.tbt,
        **_seen(chosen),
        "attainment": chosen.attainment,
        "gpus_needed": answer.needed,
        "curve": [{"gpus": gpus} | _attained(result) for gpus, result in enumerate(answer.results, start=1)],
        "unmeetable": [{"model": own.model, "why": own.unmeetable} for own in answer.alone if own.unmeetable],
    }
    if not chosen.json and answer.needed is None:
        told["gpus_needed"] = f"more than {gpus_most}"
    _tell(told, chosen.json)


def _attained(result: SimulationResult) -> dict[str, object]:
    names = ("token_attainment", "first_token_attainment", "min", "ttft_p50_s", "ttft_p99_s", "busy", "loading")
    told = {name: getattr(result, name) for name in names}
    loads_per_min = result.disk_loads_per_min
    return told if loads_per_min is msgspec.UNSET else told | {"disk_loads_per_min": loads_per_min}


# ── replay ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _replay_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("journal", type=Path, help="a file in the folder that STACCATO_JOURNAL names")
    parser.set_defaults(command=_replay)


def _replay(chosen: argparse.Namespace) -> None:
    if of_a_dispatcher(chosen.journal):
        replayed = replay_choices(chosen.journal)
        print(f"compared {replayed.chosen} choices of runtimes, after {replayed.heard} events")
        if replayed.difference:
            print(replayed.difference)
            sys.exit(1)
        return
    report = replay(chosen.journal)
    print(f"compared {report.heard} events and {report.asked} decisions; device processes in the file: {report.runs}")
    if report.difference is not None:
        print(report.difference)
        sys.exit(1)


# ── what is simulated ─────────────────────────────────────────────────────────────────────────────────────────────────


def _workload(chosen: argparse.Namespace) -> Callable[[int, int], Workload]:
    """Function that makes the workload from a number of models and a seed.

    Raises ValueError for options of a different kind of workload, so that no option is silently ignored."""
    names = ("rate", "duration", "lengths", "cv", "zipf")
    given = {name: value for name in names if (value := getattr(chosen, name)) is not None}
    kind = "servegen" if chosen.servegen else "base" if chosen.workload == "base" else "a trace"
    known = {"base": names, "servegen": ("rate", "duration"), "a trace": ("duration",)}[kind]
    if strange := [name for name in given if name not in known]:
        raise ValueError(f"--{strange[0]} is nothing that {kind} has: leave it out")
    if "duration" in given:
        given["duration_s"] = given.pop("duration")
    if kind == "base":
        return partial(base, **given)
    if kind == "servegen":
        windows, lengths = chosen.servegen
        return partial(servegen, read_windows(windows), read_lengths(lengths), **given)
    return partial(replicated, read_trace(Path(chosen.workload)), **given)


def _kind_and_count(text: str) -> tuple[Profile, int]:
    name, colon, count = text.rpartition(":")
    if not colon:
        raise argparse.ArgumentTypeError(f"{text!r} names no kind and number of GPUs: write it as h200:4")
    return _profile(name), _count(count)


def _profile(name: str) -> Profile:
    """Profile in the file `name`, else the profile of that name in PROFILES."""
    path = Path(name)
    if not path.is_file():
        path = PROFILES / f"{name}.json"
    if not path.is_file():
        ours = ", ".join(sorted(path.stem for path in PROFILES.glob("*.json")))
        raise argparse.ArgumentTypeError(f"{name!r} is neither a file nor one of {ours}")
    try:
        return load_profile(path.read_bytes(), str(path))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


# ── values of options ─────────────────────────────────────────────────────────────────────────────────────────────────

_UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h)", text.strip())
    if found is None or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no duration: write it as 100ms, 2s or 1m")
    return float(found[1]) * _UNITS_S[found[2]]


def _positive(text: str) -> float:
    return _number(text, lambda value: value > 0, "a number more than 0")


def _share(text: str) -> float:
    return _number(text, lambda value: 0 < value <= 1, "a share, as 0.9")


def _part(text: str) -> float:
    return _number(text, lambda value: 0 < value < 1, "a share below 1, as 0.25")


def _count(text: str) -> int:
    return int(_number(text, lambda value: value >= 1 and value == int(value), "a whole number of at least 1"))


def _seed(text: str) -> int:
    return int(_number(text, lambda value: value >= 0 and value == int(value), "a whole number of at least 0"))


def _number(text: str, allowed: Callable[[float], bool], what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and allowed(value)):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def _range(text: str) -> tuple[int, int]:
    least, colon, most = text.partition(":")
    if not colon or _count(least) > _count(most):
        raise argparse.ArgumentTypeError(f"{text!r} is no range: write it as 2:16")
    return _count(least), _count(most)


def _weights(text: str) -> list[float]:
    return [_positive(weight) for weight in text.split(",")]


def _setting(text: str) -> tuple[str, float]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} sets nothing: write NAME=VALUE")
    return name, _positive(value)


# ── what is printed ───────────────────────────────────────────────────────────────────────────────────────────────────


def _tell(told: Mapping[str, object], as_json: bool) -> None:
    if as_json:
        # The time of an event that never came is infinite; in JSON such a time is null.
        text = msgspec.json.encode(told)
        print((msgspec.json.format(text) if sys.stdout.isatty() else text).decode())
        return
    width = max(map(len, told))
    for name, value in told.items():
        if isinstance(value, list) and value:
            print(name)
            _table(value)
        else:
            print(f"{name.ljust(width)}  {_text(value)}")


def _table(rows: Sequence[Mapping[str, object]]) -> None:
    lines = [list(rows[0]), *([_text(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={_text(item)}" for name, item in value.items()) or "-"
    if isinstance(value, list):
        return " ".join(map(_text, value)) or "-"
    return str(value)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # worker processes end with this process
    if sys.argv[1:2] != ["replay"]:  # a replay decodes events, and compiled events can't be decoded
        start_again()
    main()
