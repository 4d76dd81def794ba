// Every page of a GPU's pool, as its allocator has it: a cell is a page.

import { get } from "./api.js";
import { colorOf, hatch, prepare, variable } from "./draw.js";
import { choice, every, h, head, setText, Table } from "./dom.js";
import { bytes, count, percent } from "./format.js";
import { gpuIds, nameOf } from "./fleet.js";

export const title = "Page map";
export const admin = true;

const SAID = { weights: "weights", kv: "KV cache", cache: "clean cache", loading: "loading", leaving: "leaving", free: "free" };

export async function show(root, { signal, say }) {
  const map = new Grid();
  let chosen = null;
  const select = choice("GPU", [], (id) => ((chosen = id), look().catch((error) => say(error.message))));
  const size = h("span", { class: "quiet" });
  root.append(head("Page map", size, select), h("div", { class: "map" }, map.canvas, map.tip), map.table.element);
  async function look() {
    const asked = chosen;
    const answer = await get(`/gpus/${encodeURIComponent(asked)}/pages`, signal);
    if (asked !== chosen) return;
    setText(size, `${count(answer.pages)} pages of ${bytes(answer.page_bytes)}`);
    map.update(answer);
  }
  every(
    2000,
    signal,
    async () => {
      const ids = await gpuIds(signal);
      if (ids.join() !== select.dataset.ids) {
        select.dataset.ids = ids.join();
        select.select.replaceChildren(...ids.map((id) => h("option", { value: id }, id)));
        chosen = ids.includes(chosen) ? chosen : ids[0];
        select.select.value = chosen ?? "";
      }
      if (chosen) await look();
    },
    say,
  );
}

class Grid {
  constructor() {
    this.canvas = h("canvas", { role: "img", ariaLabel: "Page map; the table below has its sums" });
    this.tip = h("div", { class: "tip", hidden: true });
    this.table = new Table("Pages by content and owner", [
      {
        title: "Content",
        key: (row) => row.content + row.model + document.documentElement.dataset.theme,
        cell: (row) => h("span", {}, this.sample(row), SAID[row.content]),
      },
      { title: "Owner", cell: (row) => row.name },
      { title: "Pages", number: true, cell: (row) => row.pages },
      { title: "Bytes", number: true, cell: (row) => bytes(row.pages * this.answer.page_bytes) },
      { title: "Share", number: true, cell: (row) => percent(row.pages / this.answer.pages) },
    ]);
    this.canvas.addEventListener("pointermove", (event) => this.point(event.offsetX, event.offsetY));
    this.canvas.addEventListener("pointerleave", () => (this.tip.hidden = true));
  }

  sample(row) {
    const canvas = h("canvas", { width: 22, height: 22, class: "sample", ariaHidden: "true" });
    const context = canvas.getContext("2d");
    context.scale(2, 2);
    cell(context, 0, 0, 11, row);
    return canvas;
  }

  update(answer) {
    this.answer = answer;
    const sums = new Map();
    for (const run of answer.runs) {
      const key = `${run.content} ${run.model}`;
      const name = run.model ? nameOf(answer.models[run.model], run.model) : "";
      if (!sums.has(key)) sums.set(key, { content: run.content, model: run.model, name, pages: 0 });
      sums.get(key).pages += run.pages;
    }
    const order = Object.keys(SAID);
    const rows = [...sums.values()].sort((a, b) => order.indexOf(a.content) - order.indexOf(b.content) || b.pages - a.pages);
    this.table.update(rows, (row) => `${row.content} ${row.model}`);
    this.draw();
  }

  draw() {
    const { answer, canvas } = this;
    const room = canvas.parentElement.clientWidth;
    this.size = Math.max(5, Math.min(22, Math.floor(Math.sqrt((room * 420) / answer.pages))));
    this.columns = Math.max(1, Math.floor(room / this.size));
    const { context } = prepare(canvas, Math.ceil(answer.pages / this.columns) * this.size);
    Object.assign(canvas.dataset, { columns: this.columns, cell: this.size });
    let page = 0;
    for (const run of answer.runs) {
      for (const end = page + run.pages; page < end; page += 1) {
        cell(context, (page % this.columns) * this.size, Math.floor(page / this.columns) * this.size, this.size - 1, run);
      }
    }
  }

  point(x, y) {
    const page = Math.floor(y / this.size) * this.columns + Math.floor(x / this.size);
    let beyond = 0;
    const run = this.answer?.runs.find((one) => (beyond += one.pages) > page);
    this.tip.hidden = !run;
    if (!run) return;
    const owner = run.model ? ` of ${nameOf(this.answer.models[run.model], run.model)}` : "";
    this.tip.replaceChildren(h("strong", {}, `page ${page}`), h("span", {}, `${SAID[run.content]}${owner}`));
    this.tip.style.left = `${Math.max(0, Math.min(x + 12, this.canvas.clientWidth - 200))}px`;
    this.tip.style.top = `${y + 12}px`;
  }
}

/** Weights are full, KV cache is lighter, what may go is hatched. */
function cell(context, x, y, size, { content, model }) {
  const full = { weights: 1, kv: 0.5, cache: 0.22, leaving: 0.22 }[content];
  context.fillStyle = content === "free" ? variable("--sunk") : content === "loading" ? variable("--accent") : colorOf(model, full);
  context.fillRect(x, y, size, size);
  if (content === "cache" || content === "leaving") hatch(context, x, y, size, size, colorOf(model, 0.7));
}
