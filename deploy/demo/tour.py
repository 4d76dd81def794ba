"""The tour (`make demo`): the whole platform on one machine, from two tenants to a bill equal to their tokens."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

from child import DemoError, Done, Platform, running
from corpus import TOOL, read_corpus
from openai import NotFoundError
from rich.console import Console
from rich.table import Table
from rich.text import Text
from talk import Tenant

ROOT = Path(__file__).parents[2]
MODELS = Path("deploy/demo/models")  # below ROOT
DATA = Path(".staccato/demo")  # below ROOT; emptied at the start
TENANTS = {"acme": ("faq", "poet"), "globex": ("weather", "music")}
OPTIONS = {"weather": "--tool-parser hermes"}
COLORS = {"faq": "cyan", "poet": "magenta", "weather": "yellow", "music": "green"}
PRICE_PICO = {"prompt": 500_000, "cached": 50_000, "output": 2_000_000}  # USD 0.50, 0.05 and 2 for a million tokens
DEVICE_MEMORY = "12MiB"  # room for one or two models with their requests' KV cache: models take turns
STREAMS_PER_MODEL = 2
BOOKED_S_MOST = 15.0
ASLEEP_S_MOST = 30.0
POLL_S = 0.1

Bill = dict[str, Counter[str]]  # deployment → tokens by kind

console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)


async def tour() -> None:
    began_s = time.monotonic()
    began_at = datetime.now(UTC)
    say("The platform: a bus, a ledger, a runtime, a gateway")
    console.print(f"[bold]$ export STACCATO_DATA={DATA}[/]\n[bold]$ staccato up --device-memory {DEVICE_MEMORY}[/]")
    async with running(DATA.absolute(), "--device-memory", DEVICE_MEMORY) as platform:
        console.print(f"ready at {platform.url} after {time.monotonic() - began_s:.1f} s")
        tenants = await create_tenants(platform)
        try:
            await deploy_models(platform)
            await answer_in_turn(tenants)
            await stream_together(platform, tenants)
            await call_a_tool(tenants["globex"])
            await sleep_and_wake(platform, tenants["acme"])
            await keep_apart(platform, tenants)
            await settle(platform, tenants, began_at)
        finally:
            await asyncio.gather(*(tenant.close() for tenant in tenants.values()))
        say("The end")
    console.print(f"Everything is stopped. The tour took {time.monotonic() - began_s:.1f} s.")


# ── deploying ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def create_tenants(platform: Platform) -> dict[str, Tenant]:
    say("Two tenants, each with a key, and a price for everybody")
    show(*await asyncio.gather(*(platform.command(f"tenant create {name}") for name in TENANTS)), answers=False)
    keys = await asyncio.gather(*(platform.command(f"key create {name}") for name in TENANTS))
    for key in keys:
        show_line(key.line, f"{key.out[:12]}…  (shown once)")
    await set_price(platform)
    return {name: Tenant(name, platform.url, key.out) for name, key in zip(TENANTS, keys, strict=True)}


async def set_price(platform: Platform) -> None:
    price = {f"{kind}_pico": pico for kind, pico in PRICE_PICO.items()} | {"currency": "USD"}
    show_line(f"curl $URL/api/v1/prices -H 'Authorization: Bearer …' -d {shlex.quote(json.dumps(price))}")
    await platform.ask("POST", "/prices", price)


async def deploy_models(platform: Platform) -> None:
    say(f"Four models of four architectures on one device with {DEVICE_MEMORY} of memory")
    lines = [deploy_line(tenant, model) for tenant, models in TENANTS.items() for model in models]
    show(*await asyncio.gather(*map(platform.command, lines)))


def deploy_line(tenant: str, model: str) -> str:
    line = f"deploy {model} --tenant {tenant} --model {MODELS / model} --dtype float32 --ttft 300ms --tbt 500ms"
    return f"{line} {OPTIONS[model]}" if model in OPTIONS else line


# ── chatting ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def answer_in_turn(tenants: dict[str, Tenant]) -> None:
    say("One question to each, with the official openai client")
    for tenant, model in everybody():
        question = read_corpus(model).lessons[0].questions[0]
        answer = await tenants[tenant].ask(model, question)
        console.print(f"[{COLORS[model]}]{tenant}/{model}[/] [dim]{question}  ({answer.first_ms} ms)[/]")
        console.print(Text(answer.text))


async def stream_together(platform: Platform, tenants: dict[str, Tenant]) -> None:
    say(f"{4 * STREAMS_PER_MODEL} streams at once: who got tokens when")
    heard: list[str] = []
    asked = [
        tenants[tenant].ask(model, lesson.questions[1], heard.append)
        for tenant, model in everybody()
        for lesson in read_corpus(model).lessons[1 : 1 + STREAMS_PER_MODEL]
    ]
    began_s = time.monotonic()
    await asyncio.gather(*asked)
    seconds = time.monotonic() - began_s
    legend = Text("one letter a chunk, in the order of arrival:  ")
    for _, model in everybody():
        legend.append(f"{model[0].upper()} {model}  ", style=COLORS[model])
    console.print(legend)
    console.print(Text("").join(Text(model[0].upper(), style=COLORS[model]) for model in heard))
    console.print(f"{len(heard)} chunks in {seconds:.2f} s, the model changed {changes(heard)} times on the way")
    await show_device(platform)


def changes(heard: list[str]) -> int:
    return sum(one != other for one, other in zip(heard, heard[1:], strict=False))


async def show_device(platform: Platform) -> None:
    """Show the models on the device, and how often the device changed models."""
    show(await platform.command("ps"))
    for device in (await platform.ask("GET", "/gpus"))["data"]:
        fetched = [model["fetches"] for model in device["models"].values()]
        console.print(
            f"{device['id']} went from one model to another {device['switches']} times, between two tokens; "
            f"models came from the host's memory {sum(fetched)} times"
        )


async def call_a_tool(globex: Tenant) -> None:
    say("A tool call")
    question = "What is the weather in Oslo?"
    answer = await globex.client.chat.completions.create(
        model="weather", messages=[{"role": "user", "content": question}], tools=[TOOL], temperature=0
    )
    globex.count("weather", answer.usage)
    calls = answer.choices[0].message.tool_calls or []
    if [call.function.name for call in calls] != ["get_weather"]:
        raise DemoError(f"the weather model called {[call.function.name for call in calls]} instead of get_weather")
    console.print(f"[yellow]globex/weather[/] [dim]{question}[/]")
    console.print(Text(f"{calls[0].function.name}({calls[0].function.arguments})"))


# ── scale to zero, isolation ──────────────────────────────────────────────────────────────────────────────────────────


async def sleep_and_wake(platform: Platform, acme: Tenant) -> None:
    say("Scale to zero and back")
    before = await pool(platform), platform.device_bytes()
    show(*[await platform.command(f"sleep {model} --tenant {tenant}") for tenant, model in everybody()], answers=False)
    await until_empty(platform)
    after = await pool(platform), platform.device_bytes()
    for when, ((used, total), size) in (("before", before), ("after", after)):
        console.print(
            f"{when:6}  {used / 2**20:g} of {total / 2**20:g} MiB of the device are in use; its process, with four "
            f"engines and the host's copies of their weights, has {size / 2**20:.0f} MiB of memory"
        )
    answer = await acme.ask("poet", read_corpus("poet").lessons[3].questions[0])
    console.print("[dim]and a chat to the sleeping poet:[/]")
    console.print(Text(answer.text))
    console.print(f"x-staccato-cold: {answer.cold}, x-staccato-wake-ms: {answer.wake_ms}")
    if answer.cold != "host":
        raise DemoError(f"poet slept in the host's memory, and its answer says it came from {answer.cold}")


async def pool(platform: Platform) -> tuple[int, int]:
    """Bytes in use, and bytes in total."""
    (device,) = (await platform.ask("GET", "/gpus"))["data"]
    return device["used_bytes"], device["memory_bytes"]


async def until_empty(platform: Platform) -> None:
    deadline_s = time.monotonic() + ASLEEP_S_MOST
    while (used := (await pool(platform))[0]) > 0:
        if time.monotonic() > deadline_s:
            raise DemoError(f"{used} bytes of the device are in use {ASLEEP_S_MOST:g} s after all were put to sleep")
        await asyncio.sleep(POLL_S)


async def keep_apart(platform: Platform, tenants: dict[str, Tenant]) -> None:
    say("What belongs to another tenant does not exist")
    globex, acme = tenants["globex"], tenants["acme"]
    intruder = globex.client.with_options(base_url=acme.client.base_url)
    doors = (("globex asks its own endpoint for faq", globex.client), ("globex asks acme's endpoint for faq", intruder))
    for what, client in doors:
        try:
            await client.chat.completions.create(model="faq", messages=[{"role": "user", "content": "Hello!"}])
        except NotFoundError as error:
            console.print(f"{what}: {error.status_code}, {error.body['message']}")
        else:
            raise DemoError(f"{what} and is answered")


# ── usage and the bill ────────────────────────────────────────────────────────────────────────────────────────────────


async def settle(platform: Platform, tenants: dict[str, Tenant], began_at: datetime) -> None:
    """Compare the clients' counts with usage and bill, and show them. Raises DemoError if the counts differ."""
    say("Usage and the bill")
    counted = {model: tenants[tenant].counted[model] for tenant, model in everybody()}
    await until_booked(platform, counted)
    period = f"{began_at:%Y-%m}"
    shown, known, bill = await asyncio.gather(
        platform.command("usage --by tenant,deployment"),
        platform.command("usage --by tenant,deployment --json"),
        platform.command(f"bill export --period {period}"),
    )
    show(shown, bill)
    used = usage_of(json.loads(known.out))
    rows = list(csv.DictReader(io.StringIO(bill.out)))
    billed, money = bill_of(rows), sum(Decimal(row["unrounded"]) for row in rows)
    show_comparison(counted, used, billed)
    if not counted == used == billed:
        raise DemoError("the tokens that the clients counted, the usage and the bill differ")
    if money != price_of(counted):
        raise DemoError(f"the bill says {money} USD, the tokens at their prices make {price_of(counted)} USD")
    total, paid = sum(tokens.total() for tokens in counted.values()), f"{money.normalize():f}"
    console.print(f"[bold green]The bill equals what the clients counted: {total} tokens, {paid} USD.[/]")


async def until_booked(platform: Platform, counted: Bill) -> None:
    """Wait until the usage is booked, at most BOOKED_S_MOST: usage takes its way over the bus and the ledger."""
    deadline_s = time.monotonic() + BOOKED_S_MOST
    while time.monotonic() < deadline_s:
        if usage_of((await platform.ask("GET", "/usage?group_by=deployment"))["data"]) == counted:
            return
        await asyncio.sleep(POLL_S)


def usage_of(rows: Iterable[dict[str, str]]) -> Bill:
    return {
        row["deployment"]: Counter(
            prompt=int(row["prompt_tokens"]) - int(row["cached_tokens"]),
            cached=int(row["cached_tokens"]),
            output=int(row["output_tokens"]),
        )
        for row in rows
    }


def bill_of(rows: Iterable[dict[str, str]]) -> Bill:
    bill: Bill = {}
    for row in rows:
        if row["sku"] in PRICE_PICO:
            bill.setdefault(row["deployment"], Counter())[row["sku"]] += int(row["quantity"])
    return bill


def price_of(counted: Bill) -> Decimal:
    """The price before the bill rounds to cents: a few tokens cost less than a cent."""
    return sum(
        (Decimal(tokens[kind] * pico).scaleb(-12) for tokens in counted.values() for kind, pico in PRICE_PICO.items()),
        Decimal(0),
    )


def show_comparison(counted: Bill, used: Bill, billed: Bill) -> None:
    table = Table(
        "fresh, cached and output tokens", "the client counted", "usage", "the bill", box=None, pad_edge=False
    )
    for tenant, model in everybody():
        figures = [bill.get(model, Counter()) for bill in (counted, used, billed)]
        table.add_row(
            f"{tenant}/{model}", *(" + ".join(str(tokens[kind]) for kind in PRICE_PICO) for tokens in figures)
        )
    console.print(table)


# ── showing ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def everybody() -> list[tuple[str, str]]:
    """Pairs of (tenant, model)."""
    return [(tenant, model) for tenant, models in TENANTS.items() for model in models]


def say(title: str) -> None:
    console.rule(f"[bold]{title}[/]", align="left", style="dim")


def show(*commands: Done, answers: bool = True) -> None:
    for command in commands:
        show_line(command.line, command.out if answers else "")


def show_line(line: str, answer: str = "") -> None:
    """Print a command as typed, and its answer; square brackets in the answer are no markup."""
    console.print(Text(f"$ {line}", style="bold"), soft_wrap=True)
    if answer:
        console.print(Text(answer), soft_wrap=True)


async def main() -> int:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        await tour()
    except DemoError as error:
        console.print(Text(f"the tour ends here: {error}", style="bold red"))
        return 1
    return 0


if __name__ == "__main__":
    os.chdir(ROOT)
    try:
        sys.exit(asyncio.run(main()))
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(130)
