// How well objectives are kept: the three definitions of token attainment, and first tokens on time.

import { all } from "./api.js";
import { bar, every, h, head, Table } from "./dom.js";
import { count, duration, percent } from "./format.js";

export const title = "Objectives";
export const admin = false;

const GOOD = 0.9;
const DEFINITIONS = [
  ["first_token", "First token", "requests whose first token came in time"],
  ["token", "Tokens", "token k is due at arrival + TTFT + (k − 1) × TBT"],
  ["token_rebased", "Rebased", "after a late token the clock starts again"],
  ["token_time_weighted", "Time-weighted", "share of the time in which there was something to read"],
];

export function show(root, { who, signal, say }) {
  const shares = DEFINITIONS.map(([name, text]) => ({
    title: text,
    key: (row) => row[name],
    cell: (row) => (row[name] === undefined ? h("span", { class: "quiet" }, "–") : bar(row[name], percent(row[name]), row[name] < GOOD ? "low" : "")),
  }));
  const requests = { title: "Requests", number: true, cell: (row) => count(row.requests) };
  const tenants = new Table("Attainment by tenant", [{ title: "Tenant", cell: (row) => row.tenant }, ...shares, requests]);
  const each = new Table("Attainment by deployment", [
    { title: "Deployment", cell: (row) => row.name },
    { title: "TTFT, TBT", number: true, cell: (row) => row.objective },
    ...shares,
    requests,
  ]);
  root.append(
    head("Objectives"),
    h("dl", { class: "inline" }, ...DEFINITIONS.flatMap(([, text, said]) => [h("dt", {}, text), h("dd", {}, said)])),
    h("h2", {}, "By tenant"),
    h("p", { class: "quiet small" }, "The lowest of its deployments: none hides behind another."),
    tenants.element,
    h("h2", {}, "By deployment"),
    h("p", { class: "quiet small" }, `Since the runtimes began. Below ${percent(GOOD)} is marked.`),
    each.element,
  );
  every(
    2000,
    signal,
    async () => {
      const found = await all("/deployments", signal);
      const rows = found.map((one) => ({
        id: one.id,
        tenant: one.tenant,
        name: who.admin ? `${one.tenant}/${one.name}` : one.name,
        objective: said(one.slo),
        requests: 0,
        ...one.status.attainment,
      }));
      each.update(rows, (row) => row.id);
      tenants.update(lowest(rows), (row) => row.tenant);
    },
    say,
  );
}

const said = (slo) => (slo ? `${duration(slo.ttft_ms)}, ${duration(slo.tbt_ms)}` : "default");

function lowest(rows) {
  const found = new Map();
  for (const row of rows) {
    const known = found.get(row.tenant) ?? { tenant: row.tenant, requests: 0 };
    found.set(row.tenant, known);
    known.requests += row.requests;
    for (const [name] of DEFINITIONS) {
      if (row[name] !== undefined) known[name] = Math.min(known[name] ?? 1, row[name]);
    }
  }
  return [...found.values()].sort((a, b) => (a.tenant < b.tenant ? -1 : 1));
}
