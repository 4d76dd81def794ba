// Usage and cost of a month. Amounts are added up exactly, and compared with the bill's export.

import { ask, get } from "./api.js";
import { chart, variable } from "./draw.js";
import { choice, every, h, head, setText, Table } from "./dom.js";
import { count, duration, exact, money } from "./format.js";

export const title = "Usage and cost";
export const admin = false;

const FORMATS = ["csv", "jsonl", "parquet", "focus"];
const NANO = exact("0.000000001"); // a row of the usage is rounded to 12 places, a line of the bill is not
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
  const compare = h("button", { onclick: () => compared().catch((error) => say(error.message)) }, "Compare with the export");
  const exports = FORMATS.map((format) => h("button", { onclick: () => save(month, format).catch((error) => say(error.message)) }, format));
  const box = h("div", { class: "chart" });
  const holder = h("div");
  root.append(
    head("Usage and cost", months, grouping),
    figures,
    h("p", { class: "tools" }, compare, h("span", { class: "gap" }), h("span", { class: "quiet small" }, "Export"), ...exports),
    verdict,
    h("h2", {}, "Output tokens by day"),
    box,
    holder,
  );
  const plot = chart(box, [{ label: "Output tokens", color: variable("--accent") }], { bars: true, value: count });
  signal.addEventListener("abort", () => plot.close());
  let table = null;

  async function look() {
    const range = `from=${month}-01&to=${next(month)}-01`;
    const asked = `${month} ${by}`;
    const group = by === "tenant" || !who.admin ? by : `tenant,${by}`;
    const [rows, days] = await Promise.all([get(`/usage?${range}&group_by=${group}`, signal), get(`/usage?${range}&group_by=day`, signal)]);
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
    const sums = totals(rows.data);
    const all = (name) => rows.data.reduce((sum, row) => sum + row[name], 0);
    const said = [
      ["Requests", count(all("requests"))],
      ["Prompt tokens", count(all("prompt_tokens"))],
      ["Output tokens", count(all("output_tokens"))],
      ["GPU time", duration(all("gpu_ms"))],
      ...[...sums].map(([currency, amount]) => [`Cost, ${currency}`, money(amount)]),
    ];
    const key = said.flat().join();
    if (figures.dataset.key !== key) {
      figures.dataset.key = key;
      figures.replaceChildren(...said.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
    }
    const byDay = new Map(days.data.map((row) => [row.day, row.output_tokens]));
    const dates = daysOf(month);
    plot.update([dates.map((day) => Date.parse(day) / 1000), dates.map((day) => byDay.get(day) ?? null)]);
  }

  async function compared() {
    const rows = await get(`/usage?from=${month}-01&to=${next(month)}-01&group_by=deployment`, signal);
    const answer = await ask(`api/v1/billing/export?period=${month}&format=jsonl`, { signal });
    const lines = (await answer.text()).split("\n").filter(Boolean).map((line) => JSON.parse(line));
    const billed = totals(lines.filter((line) => line.sku !== "correction" && line.month === month).map((line) => ({ ...line, amount: line.unrounded })));
    const shown = totals(rows.data);
    const currencies = [...new Set([...billed.keys(), ...shown.keys()])];
    const apart = (currency) => (billed.get(currency) ?? 0n) - (shown.get(currency) ?? 0n);
    const unequal = currencies.filter((currency) => apart(currency) > NANO || apart(currency) < -NANO);
    const sum = (from) => currencies.map((currency) => `${money(from.get(currency) ?? 0n, 9)} ${currency}`).join(", ") || "nothing";
    setText(verdict, unequal.length ? `The export has ${sum(billed)}, here it is ${sum(shown)}.` : `Equal to the export: ${sum(billed)}.`);
    verdict.classList.toggle("wrong", unequal.length > 0);
  }

  every(10_000, signal, look, say);
}

/** By currency; what had no price cost nothing. */
function totals(rows) {
  const sums = new Map();
  for (const { currency, amount } of rows) {
    if (currency) sums.set(currency, (sums.get(currency) ?? 0n) + exact(amount));
  }
  return sums;
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
