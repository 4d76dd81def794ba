// Who held each GPU, turn by turn; zoomed out, shares of time in buckets. All of the time is there: nothing is sampled.

import { colorOf, hatch, prepare, variable } from "./draw.js";
import { choice, dot, every, h, head, setText, Table } from "./dom.js";
import { clock, duration, percent } from "./format.js";
import { gpuIds, nameOf, timelineOf } from "./fleet.js";

export const title = "Timeline";
export const admin = true;

const S = 1e6;
const WINDOWS = [["60", "1 minute"], ["600", "10 minutes"], ["3600", "1 hour"], ["21600", "6 hours"], ["86400", "24 hours"]];
const LANE = 46;
const GAP = 10;
const LEFT = 64;
const AXIS = 22;
const ORDER = { steps: 0, switch: 1, platform: 2, open: 3, away: 4, idle: 5 };
const LONGEST_US = 172_800 * S;

export function show(root, { signal, say }) {
  const view = new View(signal, say);
  root.append(...view.elements);
  every(1000, signal, () => view.tick(), say);
}

class View {
  constructor(signal, say) {
    this.signal = signal;
    this.say = say;
    this.span_us = 60 * S;
    this.to_us = null; // null: live
    this.lanes = [];
    this.last = new Map(); // answers by GPU
    this.cursor = null;
    this.canvas = h("canvas", { tabIndex: 0, role: "img", ariaLabel: "Timeline; the table below has its sums" });
    this.tip = h("div", { class: "tip", hidden: true, role: "status" });
    this.span = h("span", { class: "quiet" });
    this.live = h("button", { onclick: () => this.look(this.span_us, null) }, "Live");
    this.window = choice("Show", WINDOWS, (value) => this.look(Number(value) * S, this.to_us));
    this.legend = h("ul", { class: "legend" });
    this.sums = new Table("Where the time of each GPU went", [
      { title: "GPU", cell: (lane) => lane.id },
      ...["steps", "switch", "idle", "platform", "open", "away"].map((use) => ({
        title: use,
        number: true,
        cell: (lane) => percent(lane.sums[use] / lane.wall || 0),
      })),
      { title: "covered", number: true, cell: (lane) => duration(lane.wall / 1000) },
      { title: "turns", number: true, cell: (lane) => lane.turns ?? "" },
      { title: "switches", number: true, cell: (lane) => lane.switches ?? "" },
    ]);
    this.elements = [
      head("Timeline", this.span, this.window, this.live),
      h("div", { class: "lanes" }, this.canvas, this.tip),
      this.legend,
      h("p", { class: "quiet small" }, "Drag or ← → to move, wheel or + − to zoom, ↑ ↓ , . to go from turn to turn, Home for now."),
      this.sums.element,
    ];
    this.listen();
  }

  // ── what is looked at ──

  look(spanUs, toUs) {
    this.span_us = Math.max(1000, Math.min(LONGEST_US, spanUs));
    this.to_us = toUs !== null && toUs >= Date.now() * 1000 ? null : toUs;
    this.last = new Map();
    this.cursor = null;
    this.tip.hidden = true; // the box under the tip has moved
    this.due = 0;
    this.tick().catch((error) => this.signal.aborted || this.say(error.message));
  }

  async tick() {
    const live = this.to_us === null;
    this.live.classList.toggle("on", live);
    const to = Math.round(live ? Date.now() * 1000 : this.to_us);
    const pause = live ? Math.min(60_000, this.span_us / 1000 / 30) : Infinity; // a thirtieth of what is seen
    if (performance.now() < (this.due ?? 0)) return;
    this.due = performance.now() + Math.max(1000, pause) - 50;
    const looked = `${this.span_us} ${this.to_us}`;
    const ids = await gpuIds(this.signal);
    const from = to - this.span_us;
    const answers = await Promise.all(ids.map((id) => this.answer(id, from, to)));
    if (looked !== `${this.span_us} ${this.to_us}`) return; // it was moved meanwhile
    this.range = { from, to };
    this.lanes = ids.map((id, index) => lane(id, answers[index]));
    this.last = new Map(answers.map((answer, index) => [ids[index], answer]));
    this.draw();
    setText(this.span, `${clock(from, this.span_us > 43_200 * S)} – ${clock(to)}`);
    this.sums.update(this.lanes, (one) => one.id);
    this.name();
  }

  /** Of what is there already only the last two turns are asked for again: they may have gone on. */
  async answer(id, from, to) {
    const before = this.to_us === null ? this.last.get(id) : null;
    const at = before?.spans.at(-2)?.at_us;
    if (!at || before.bucket_us || before.from_us > from || at <= from) return timelineOf(id, from, to, this.signal);
    const answer = await timelineOf(id, at, to, this.signal);
    if (answer.bucket_us || answer.from_us !== at) return timelineOf(id, from, to, this.signal);
    const kept = before.spans.filter((span) => span.at_us < at && span.at_us + span.us > from);
    const cut = Math.max(0, Math.round(from) - kept[0].at_us);
    kept[0] = { ...kept[0], at_us: kept[0].at_us + cut, us: kept[0].us - cut };
    const stages = before.stages.filter((stage) => stage.at_us + stage.us > from && stage.at_us + stage.us <= at);
    return {
      ...answer,
      from_us: kept[0].at_us,
      spans: [...kept, ...answer.spans],
      stages: [...stages, ...answer.stages],
      models: { ...before.models, ...answer.models },
    };
  }

  name() {
    const totals = new Map();
    const names = {};
    for (const one of this.lanes) {
      Object.assign(names, one.models);
      for (const span of one.spans) {
        if (span.use === "steps") totals.set(span.model, (totals.get(span.model) ?? 0) + span.us);
      }
    }
    this.names = names;
    const wall = this.lanes.reduce((sum, one) => sum + one.wall, 0);
    const largest = [...totals].sort((a, b) => b[1] - a[1]).slice(0, 12);
    const said = largest.map(([key, us]) => `${nameOf(names[key], key)} ${percent(us / wall)}`);
    const key = said.join() + document.documentElement.dataset.theme;
    if (key === this.legend.dataset.key) return;
    this.legend.dataset.key = key;
    const others = [["switch", "--switch"], ["platform", "--others"]];
    this.legend.replaceChildren(
      ...largest.map(([model], index) => h("li", {}, dot(colorOf(model)), said[index])),
      ...others.map(([text, color]) => h("li", { class: "quiet" }, dot(variable(color)), text)),
    );
  }

  // ── drawing ──

  draw() {
    const height = this.lanes.length * (LANE + GAP) + AXIS;
    const { context, width } = prepare(this.canvas, height);
    this.width = width;
    const scale = (width - LEFT) / (this.range.to - this.range.from);
    this.x = (us) => LEFT + (us - this.range.from) * scale;
    this.us = (x) => this.range.from + (x - LEFT) / scale;
    this.axis(context, height);
    this.lanes.forEach((one, index) => {
      const y = index * (LANE + GAP);
      context.fillStyle = variable("--ink");
      context.textBaseline = "middle";
      context.fillText(one.id, 0, y + LANE / 2);
      context.fillStyle = variable("--sunk");
      context.fillRect(LEFT, y, width - LEFT, LANE);
      this.color = null;
      for (const box of one.drawn) this.box(context, box, y);
    });
    this.markCursor(context);
  }

  box(context, { span, at, us, low, high }, y) {
    const left = Math.max(LEFT, this.x(at));
    const right = Math.min(this.width, this.x(at + us));
    const size = Math.max(right - left, 0.4);
    if (right < LEFT || left > this.width) return;
    const top = y + LANE * (1 - high);
    const tall = LANE * (high - low);
    if (span.use === "open" || span.use === "away") {
      hatch(context, left, top, size, tall, variable(span.use === "away" ? "--bad" : "--others"));
      return;
    }
    const color = span.use === "steps" ? colorOf(span.model) : variable(span.use === "switch" ? "--switch" : "--others");
    if (this.color !== color) context.fillStyle = this.color = color;
    context.fillRect(left, top, size, tall);
  }

  axis(context, height) {
    const steps = [0.001, 0.01, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 600, 1800, 3600, 10_800, 21_600];
    const apart = Math.max(0.09, 64 / (this.width - LEFT)); // share of the axis between two labels, at least
    const step = (steps.find((s) => (s * S) / (this.range.to - this.range.from) > apart) ?? 43_200) * S;
    context.textBaseline = "alphabetic";
    for (let at = Math.ceil(this.range.from / step) * step; at < this.range.to; at += step) {
      const x = Math.round(this.x(at)) + 0.5;
      context.fillStyle = variable("--line");
      context.fillRect(x, 0, 1, height - AXIS);
      context.fillStyle = variable("--quiet");
      const text = step < S ? `${clock(at)}.${String(Math.round((at % S) / 1000)).padStart(3, "0")}` : clock(at);
      if (x + 50 < this.width) context.fillText(text, x + 3, height - 6);
    }
  }

  markCursor(context) {
    if (!this.cursor) return;
    const { lane: index, box } = this.cursor;
    const left = Math.max(LEFT, this.x(box.at));
    context.strokeStyle = variable("--ink");
    context.lineWidth = 1.5;
    context.strokeRect(left, index * (LANE + GAP) - 2, Math.max(2, Math.min(this.width, this.x(box.at + box.us)) - left), LANE + 4);
  }

  // ── hands and keys ──

  listen() {
    let grip = null;
    const { canvas } = this;
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.zoom(event.deltaY > 0 ? 1.4 : 1 / 1.4, this.us?.(event.offsetX));
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      grip = { x: event.offsetX, to: this.range?.to };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointerup", () => (grip = null));
    canvas.addEventListener("pointermove", (event) => {
      if (grip?.to && Math.abs(event.offsetX - grip.x) > 3) {
        this.look(this.span_us, grip.to - (event.offsetX - grip.x) * (this.span_us / (this.width - LEFT)));
      } else if (!grip) this.point(event.offsetX, event.offsetY);
    });
    canvas.addEventListener("pointerleave", () => (this.tip.hidden = true));
    canvas.addEventListener("keydown", (event) => {
      const act = {
        ArrowLeft: () => this.pan(-0.25),
        ArrowRight: () => this.pan(0.25),
        "+": () => this.zoom(0.5),
        "=": () => this.zoom(0.5),
        "-": () => this.zoom(2),
        Home: () => this.look(this.span_us, null),
        ",": () => this.step(-1, 0),
        ".": () => this.step(1, 0),
        ArrowUp: () => this.step(0, -1),
        ArrowDown: () => this.step(0, 1),
      }[event.key];
      if (!act || !this.range) return;
      event.preventDefault();
      act();
    });
    const resized = new ResizeObserver(() => this.range && this.draw());
    queueMicrotask(() => resized.observe(canvas.parentElement));
    this.signal.addEventListener("abort", () => resized.disconnect());
  }

  zoom(factor, around = this.range.to) {
    const live = this.to_us === null && around > this.range.to - this.span_us * 0.1;
    const to = around + (this.range.to - around) * factor;
    this.look(this.span_us * factor, live ? null : to);
  }

  pan(share) {
    this.look(this.span_us, this.range.to + this.span_us * share);
  }

  step(along, across) {
    const lane = Math.max(0, Math.min(this.lanes.length - 1, (this.cursor?.lane ?? 0) + across));
    const { boxes } = this.lanes[lane];
    if (!boxes.length) return;
    const at = this.cursor?.box.at ?? this.range.to;
    let place = boxes.findIndex((box) => box.at + box.us > at);
    if (place < 0) place = boxes.length - 1;
    const box = boxes[Math.max(0, Math.min(boxes.length - 1, place + along))];
    this.cursor = { lane, box };
    this.draw();
    this.tell(this.lanes[lane], box, Math.max(LEFT, this.x(box.at)), lane * (LANE + GAP) + LANE);
  }

  point(x, y) {
    const index = Math.floor(y / (LANE + GAP));
    const one = this.lanes[index];
    const share = 1 - (y - index * (LANE + GAP)) / LANE;
    const at = this.us?.(x);
    const box = one?.boxes.find((b) => b.at <= at && at < b.at + b.us && b.low <= share && share < b.high);
    if (!box || x < LEFT) this.tip.hidden = true;
    else this.tell(one, box, x, y + 14);
  }

  tell(one, box, x, y) {
    const lines = why(one, box);
    this.tip.replaceChildren(h("strong", {}, lines[0]), ...lines.slice(1).map((line) => h("span", {}, line)));
    this.tip.hidden = false;
    this.tip.style.left = `${Math.max(0, Math.min(x + 8, this.width - 300))}px`;
    this.tip.style.top = `${y + 6}px`;
  }
}

const name = ({ span }) => span.use + span.model;

/** Boxes to draw: turns fill the lane, the shares of a bucket stand on each other. */
function lane(id, answer) {
  const spans = answer.spans;
  const sums = { steps: 0, switch: 0, idle: 0, platform: 0, open: 0, away: 0 };
  for (const span of spans) sums[span.use] += span.us;
  const wall = answer.to_us - answer.from_us;
  const turns = answer.bucket_us ? null : spans.filter((span) => span.use === "steps").length;
  const switches = answer.bucket_us ? null : spans.filter((span) => span.use === "switch").length;
  const boxes = answer.bucket_us ? stacked(spans) : spans.map((span) => ({ span, at: span.at_us, us: span.us, low: 0, high: 1 }));
  // One colour after the other: to change it costs more than to fill a box.
  const drawn = boxes.filter((box) => box.span.use !== "idle").sort((a, b) => (name(a) < name(b) ? -1 : 1));
  return { id, drawn, spans, sums, wall, turns, switches, boxes, stages: answer.stages, models: answer.models, bucket_us: answer.bucket_us };
}

function stacked(spans) {
  const buckets = new Map();
  for (const span of spans) {
    if (!buckets.has(span.at_us)) buckets.set(span.at_us, []);
    buckets.get(span.at_us).push(span);
  }
  return [...buckets].flatMap(([at, shares]) => {
    shares.sort((a, b) => ORDER[a.use] - ORDER[b.use] || (a.model < b.model ? -1 : 1));
    const us = shares.reduce((sum, span) => sum + span.us, 0);
    let low = 0;
    return shares.map((span) => {
      const box = { span, at, us, low, high: low + span.us / us };
      low = box.high;
      return box;
    });
  });
}

/** What hover says: what it was, how long, and of a switch why. */
function why(one, { span, at, us }) {
  const name = nameOf(one.models[span.model], span.model);
  const what = { steps: name, switch: `switch to ${name}`, idle: "idle: nobody wanted anything", platform: "platform", open: "not known yet", away: "no device process" };
  const lines = [`${one.id} · ${what[span.use]}`];
  if (one.bucket_us) {
    lines.push(`${duration(span.us / 1000)} of ${duration(us / 1000)} from ${clock(at)}: ${percent(span.us / us)}`);
    return lines;
  }
  lines.push(`${duration(span.us / 1000)} from ${clock(at)}`);
  if (span.use === "steps") lines.push(`${span.steps} steps, up to ${span.requests} requests at once`);
  if (span.why) {
    const { requests, firsts, due_ms } = span.why;
    lines.push(`${requests} of its requests waited, ${firsts} for the first token`);
    lines.push(due_ms < 0 ? `the next token was ${duration(-due_ms)} late` : `the next token was due in ${duration(due_ms)}`);
  }
  for (const stage of one.stages) {
    const meets = stage.at_us < at + us && stage.at_us + stage.us > at;
    if (meets && (span.use === "platform" || (span.use === "switch" && stage.model === span.model))) {
      lines.push(`${stage.name} of ${nameOf(one.models[stage.model], stage.model)}: ${duration(stage.us / 1000)}`);
    }
  }
  return lines.slice(0, 7);
}
