// Per GPU: who holds it, whose pages are there, what waits, how fast tokens come.

import { key } from "./api.js";
import { chart, colorOf, prepare, variable } from "./draw.js";
import { dot, every, h, head, setText, Table } from "./dom.js";
import { bytes, count, plural } from "./format.js";
import { gpus, nameOf } from "./fleet.js";

export const title = "Now";
export const admin = true;

const WINDOW_S = 180; // of the chart
const GAP_S = 10; // seconds without a look
const BUSY_MOST = 4;

export function show(root, { signal, say }) {
  const totals = h("p", { class: "quiet", id: "totals" });
  const alerts = h("ul", { class: "alerts" });
  const cards = h("div", { class: "cards" });
  const box = h("div", { class: "chart" });
  root.append(head("Now", totals), alerts, cards, h("h2", {}, "Tokens per second, by GPU"), box);
  const known = new Map();
  const speeds = new Speeds(box);
  signal.addEventListener("abort", () => speeds.close());
  every(
    2000,
    signal,
    async () => {
      const found = await gpus(signal);
      const rates = speeds.add(found);
      for (const gpu of found) {
        if (!known.has(gpu.id)) {
          const card = new Card(gpu.id);
          known.set(gpu.id, card);
          cards.append(card.element);
        }
        known.get(gpu.id).update(gpu, rates.get(gpu.id));
      }
      for (const [id, card] of known) {
        if (!found.some((gpu) => gpu.id === id)) {
          card.element.remove();
          known.delete(id);
        }
      }
      const models = new Set(found.flatMap((gpu) => Object.keys(gpu.models)));
      const speed = [...rates.values()].reduce((sum, rate) => sum + (rate ?? 0), 0);
      setText(totals, `${plural(found.length, "GPU")} · ${plural(models.size, "model")} · ${count(speed)} tokens/s`);
      warn(alerts, found);
    },
    say,
  );
}

function warn(list, found) {
  const said = found.flatMap((gpu) => [
    ...(gpu.engine ? [] : [`${gpu.id} has no device process: it is being started`]),
    ...(gpu.draining ? [`${gpu.id} drains${gpu.surplus ? " for want of load" : ""}`] : []),
    ...Object.entries(gpu.models)
      .filter(([, model]) => model.error)
      .map(([key, model]) => `${nameOf(model.deployments, key)} on ${gpu.id}: ${model.error}`),
  ]);
  if (said.join("\n") === list.dataset.said) return;
  list.dataset.said = said.join("\n");
  list.replaceChildren(...said.map((text) => h("li", {}, text)));
}

class Card {
  constructor(id) {
    this.holder = h("span", { class: "holder" });
    this.mark = dot("transparent");
    this.rate = h("span", { class: "figure" });
    this.queue = h("span", { class: "quiet" });
    this.canvas = h("canvas", { role: "img" });
    this.memory = h("p", { class: "quiet small" });
    this.busy = new Table(
      `Busiest models of ${id}`,
      [
        { title: "Model", key: (row) => row.key + document.documentElement.dataset.theme, cell: (row) => h("span", {}, dot(colorOf(row.key)), row.name) },
        { title: "Run", number: true, cell: (row) => row.running },
        { title: "Wait", number: true, cell: (row) => row.waiting },
        { title: "KV", number: true, cell: (row) => bytes(row.kv_bytes) },
      ],
      "No model has requests.",
    );
    this.element = h(
      "section",
      { class: "card", ariaLabel: `GPU ${id}` },
      h("h2", {}, id, h("span", { class: "gap" }), this.rate),
      h("p", { class: "line" }, this.mark, this.holder, h("span", { class: "gap" }), this.queue),
      h("div", { class: "strip" }, this.canvas),
      this.memory,
      this.busy.element,
    );
  }

  update(gpu, rate) {
    const models = Object.entries(gpu.models).map(([key, model]) => ({ key, name: nameOf(model.deployments, key), ...model }));
    const holder = models.find((model) => model.key === gpu.holder);
    setText(this.holder, holder ? holder.name : "idle");
    this.mark.style.background = holder ? colorOf(holder.key) : variable("--line");
    setText(this.rate, rate === undefined ? "" : `${count(rate)} tok/s`);
    const running = models.reduce((sum, model) => sum + model.running, 0);
    const waiting = models.reduce((sum, model) => sum + model.waiting, 0);
    setText(this.queue, `${running} running, ${waiting} waiting`);
    const weights = models.reduce((sum, model) => sum + model.weights_bytes, 0);
    const kv = models.reduce((sum, model) => sum + model.kv_bytes, 0);
    const free = gpu.memory_bytes - gpu.used_bytes;
    const said = `${bytes(weights)} weights · ${bytes(kv)} KV · ${bytes(free)} free`;
    setText(this.memory, said);
    this.strip(gpu, models, said);
    const busy = models.filter((model) => model.running + model.waiting);
    busy.sort((a, b) => b.running + b.waiting - a.running - a.waiting || (a.key < b.key ? -1 : 1));
    busy.length = Math.min(busy.length, BUSY_MOST);
    this.busy.update(busy, (row) => busy.indexOf(row)); // by place: rows change, and do not come and go
  }

  strip(gpu, models, said) {
    const parts = models.map((model) => `${model.key} ${model.weights_bytes} ${model.kv_bytes}`).join();
    const seen = `${parts} ${gpu.memory_bytes} ${this.canvas.parentElement.clientWidth} ${variable("--line")}`;
    if (seen === this.seen) return;
    this.seen = seen;
    this.canvas.ariaLabel = `Memory: ${said}`;
    const { context, width } = prepare(this.canvas, 22);
    context.fillStyle = variable("--sunk");
    context.fillRect(0, 0, width, 22);
    let at = 0;
    for (const strength of [1, 0.5]) {
      for (const model of models) {
        const size = ((strength === 1 ? model.weights_bytes : model.kv_bytes) / gpu.memory_bytes) * width;
        if (!size) continue;
        context.fillStyle = colorOf(model.key, strength);
        context.fillRect(at, 0, Math.max(size - 0.5, 0.5), 22);
        at += size;
      }
    }
  }
}

/** What was seen with one key; kept while other pages are shown, forgotten with the tab. */
let seen = null;

function remembered() {
  if (seen?.key !== key.get()) seen = { key: key.get(), last: new Map(), times: [], lines: new Map() };
  return seen;
}

/** Tokens per second of each GPU, from the counters of its models, for the last three minutes. */
class Speeds {
  constructor(box) {
    this.box = box;
    Object.assign(this, remembered()); // the same maps and arrays, which grow
    if (this.lines.size) this.draw();
  }

  add(found) {
    const at = Date.now() / 1000;
    const rates = new Map();
    for (const gpu of found) {
      const tokens = Object.values(gpu.models).reduce((sum, model) => sum + model.tokens, 0);
      const before = this.last.get(gpu.id);
      if (before && at > before.at) rates.set(gpu.id, Math.max(0, tokens - before.tokens) / (at - before.at));
      this.last.set(gpu.id, { tokens, at });
    }
    if (!rates.size) return rates;
    if (at - this.times.at(-1) > GAP_S) this.point(at - GAP_S, new Map()); // nobody looked: the line has a gap
    this.point(at, rates);
    this.draw();
    return rates;
  }

  point(at, rates) {
    for (const id of rates.keys()) if (!this.lines.has(id)) this.lines.set(id, Array(this.times.length).fill(null));
    this.times.push(at);
    for (const [id, line] of this.lines) line.push(rates.get(id) ?? null);
    while (this.times[0] < at - WINDOW_S) {
      this.times.shift();
      for (const line of this.lines.values()) line.shift();
    }
  }

  draw() {
    const ids = [...this.lines.keys()].sort();
    if (ids.join() !== this.ids) {
      this.plot?.close();
      this.ids = ids.join();
      this.plot = chart(this.box, ids.map((id) => ({ label: id, color: colorOf(`gpu ${id}`) })), { windowS: WINDOW_S, value: count });
    }
    this.plot.update([this.times, ...ids.map((id) => this.lines.get(id))]);
  }

  close() {
    this.plot?.close();
  }
}
