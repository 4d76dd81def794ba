// Usage and cost of a month, corrections included. Amounts are added up exactly, and compared with the bill's export.

import { all, ask, get } from "./api.js";
import { compared, costOf } from "./bill.js";
import { chart, variable } from "./draw.js";
import { choice, every, h, head, setText, Table } from "./dom.js";
import { clock, count, duration, exact, money } from "./format.js";

export const title = "Usage and cost";
export const admin = false;

const FORMATS = ["csv", "jsonl", "parquet", "focus"];
const COLUMNS = [
  ["Requests", (row) => count(row.requests)],
  ["Prompt", (row) => count(row.prompt_tokens)],
  ["Cached", (row) => count(row.cached_tokens)],
  ["Output", (row) => count(row.output_tokens)],
  ["GPU", (row) => duration(row.gpu_ms)],
  ["Switches", (row) => duration(row.switch_ms)],
  ["KV GB·s", (row) => count(row.kv_gb_s)],
  ["Cost", (row) => money(exact(row.amount))],
];

export function show(root, { who, signal, say }) {
  let month = new Date().toISOString().slice(0, 7);
  let by = "deployment";
  const groups = [["deployment", "deployment"], ["model", "model"], ["key", "key"], ["day", "day"]];
  if (who.admin) groups.unshift(["tenant", "tenant"]);
  const reload = () => look().catch((error) => signal.aborted || say(error.message));
  const months = choice("Month", lastMonths(), (value) => ((month = value), reload()));
  const grouping = choice("By", groups, (value) => ((by = value), reload()));
  grouping.select.value = by;
  const figures = h("dl", { class: "figures" });
  const verdict = h("p", { class: "quiet small", id: "verdict", role: "status" });
  const compare = h("button", { onclick: () => compareWithExport().catch((error) => say(error.message)) }, "Compare with the export");
  const exports = FORMATS.map((format) => h("button", { onclick: () => save(month, format).catch((error) => say(error.message)) }, format));
  const box = h("div", { class: "chart" });
  const holder = h("div");
  const corrections = new Table("Corrections", [
    { title: "When", cell: (row) => clock(Date.parse(row.created_at) * 1000, true) },
    { title: "Bill corrected", cell: (row) => row.corrects },
    { title: "Reason", cell: (row) => row.reason },
    { title: "Amount", number: true, cell: (row) => `${row.amount} ${row.currency}` },
  ]);
  const corrected = h("section", { hidden: true }, h("h2", {}, "Corrections on this bill"), corrections.element);
  root.append(
    head("Usage and cost", months, grouping),
    figures,
    h("p", { class: "tools" }, compare, h("span", { class: "gap" }), h("span", { class: "quiet small" }, "Export"), ...exports),
    verdict,
    h("h2", {}, "Output tokens by day"),
    box,
    holder,
    corrected,
  );
  const plot = chart(box, [{ label: "Output tokens", color: variable("--accent") }], { bars: true, value: count });
  signal.addEventListener("abort", () => plot.close());
  let table = null;

  async function look() {
    const range = `from=${month}-01&to=${next(month)}-01`;
    const asked = `${month} ${by}`;
    const group = by === "tenant" || !who.admin ? by : `tenant,${by}`;
    const [rows, days, made] = await Promise.all([
      get(`/usage?${range}&group_by=${group}`, signal),
      get(`/usage?${range}&group_by=day`, signal),
      correctionsOf(month),
    ]);
    if (asked !== `${month} ${by}`) return;
    if (table?.by !== by) {
      const names = group.split(",");
      const named = names.map((name) => ({ title: name, cell: (row) => row[name] ?? "" }));
      table = new Table("Usage", [...named, ...COLUMNS.map(([text, cell]) => ({ title: text, cell, number: true }))]);
      table.by = by;
      table.keyOf = (row) => names.map((name) => row[name]).join("\n") + row.currency;
      holder.replaceChildren(table.element);
    }
    table.update(rows.data, table.keyOf);
    const cost = costOf(rows.data, made);
    const sum = (name) => rows.data.reduce((sum, row) => sum + row[name], 0);
    const said = [
      ["Requests", count(sum("requests"))],
      ["Prompt tokens", count(sum("prompt_tokens"))],
      ["Output tokens", count(sum("output_tokens"))],
      ["GPU time", duration(sum("gpu_ms"))],
      ...cost.currencies.flatMap((currency) => figuresOf(cost, currency)),
    ];
    const key = said.flat().join();
    if (figures.dataset.key !== key) {
      figures.dataset.key = key;
      figures.replaceChildren(...said.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
    }
    corrected.hidden = made.length === 0;
    corrections.update(made, (row) => row.id);
    const byDay = new Map(days.data.map((row) => [row.day, row.output_tokens]));
    const dates = daysOf(month);
    plot.update([dates.map((day) => Date.parse(day) / 1000), dates.map((day) => byDay.get(day) ?? null)]);
  }

  async function compareWithExport() {
    const asked = month;
    const [rows, made, answer] = await Promise.all([
      get(`/usage?from=${asked}-01&to=${next(asked)}-01&group_by=deployment`, signal),
      correctionsOf(asked),
      ask(`api/v1/billing/export?period=${asked}&format=jsonl`, { signal }),
    ]);
    const lines = (await answer.text()).split("\n").filter(Boolean).map((line) => JSON.parse(line));
    const { equal, sentence } = compared(costOf(rows.data, made), lines, asked);
    setText(verdict, sentence);
    verdict.classList.toggle("wrong", !equal);
  }

  /** Those on the bill of that month, whichever bill they correct. */
  const correctionsOf = async (period) => (await all("/billing/corrections", signal)).filter((row) => row.period === period);

  every(10_000, signal, look, say);
}

/** Usage and corrections stand apart where there are corrections; the cost is always their sum. */
function figuresOf(cost, currency) {
  const whole = [`Cost, ${currency}`, money(cost.together.get(currency))];
  if (!cost.corrected.has(currency)) return [whole];
  const part = (name, sums) => [`${name}, ${currency}`, money(sums.get(currency) ?? 0n)];
  return [part("Usage", cost.used), part("Corrections", cost.corrected), whole];
}

async function save(month, format) {
  const answer = await ask(`api/v1/billing/export?period=${month}&format=${format}`);
  const name = /filename="([^"]+)"/.exec(answer.headers.get("content-disposition") ?? "")?.[1] ?? `staccato-${month}.${format}`;
  const url = URL.createObjectURL(await answer.blob());
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

const next = (month) => new Date(Date.UTC(Number(month.slice(0, 4)), Number(month.slice(5)), 1)).toISOString().slice(0, 7);

function lastMonths() {
  const now = new Date();
  return Array.from({ length: 12 }, (_, back) => {
    const text = new Date(Date.UTC(now.getUTCFullYear(), now.getUTCMonth() - back, 1)).toISOString().slice(0, 7);
    return [text, text];
  });
}

function daysOf(month) {
  const days = (Date.parse(`${next(month)}-01`) - Date.parse(`${month}-01`)) / 86_400_000;
  return Array.from({ length: days }, (_, day) => `${month}-${String(day + 1).padStart(2, "0")}`);
}
