// Events: what was done and by whom, and what became of deployments while one looks.

import { ask, events, get } from "./api.js";
import { every, h, head, setText, Table, wait } from "./dom.js";
import { clock, count } from "./format.js";

export const title = "Events";
export const admin = false;

const ROWS = 100;
const AGAIN_MS = 1000;

export function show(root, { who, signal, say }) {
  let done = [];
  const names = new Map(); // of what has an id
  const became = [];
  let phases = 0; // that were ever in it
  const [, asked = ""] = location.hash.split("?");
  const filter = h("input", { type: "search", value: decodeURIComponent(asked), placeholder: "Filter", ariaLabel: "Filter by any word", oninput: draw });
  const verdict = h("p", { class: "quiet", role: "status", id: "chain" });
  const table = new Table(
    "Events",
    [
      { title: "When", cell: (row) => clock(row.at_us, true) },
      { title: "What", cell: (row) => row.kind },
      ...(who.admin ? [{ title: "Tenant", cell: (row) => row.tenant }] : []),
      { title: "Whom", cell: (row) => row.subject },
      { title: "Change", cell: (row) => row.change },
      { title: "By", cell: (row) => row.by },
    ],
    "Nothing has been done yet.",
  );
  root.append(
    head("Events", filter, h("button", { onclick: verify }, "Verify the log")),
    verdict,
    h("p", { class: "quiet small" }, `The last ${ROWS} of the audit log, and phases of deployments since this page was opened.`),
    table.element,
  );

  function draw() {
    const wanted = filter.value.toLowerCase();
    const rows = [...done, ...became].sort((a, b) => b.at_us - a.at_us || b.seq - a.seq);
    table.update(
      rows.filter((row) => `${row.kind} ${row.tenant} ${row.subject} ${row.change} ${row.by} ${row.whom}`.toLowerCase().includes(wanted)),
      (row) => row.id,
    );
  }

  async function look() {
    const rows = (await get(`/audit?order=newest&limit=${ROWS}`, signal)).data;
    for (const row of rows) if (nameOf(row)) names.set(row.subject_id, nameOf(row));
    done = rows.map((row) => entry(row, names));
    draw();
  }

  async function verify() {
    try {
      const said = await get("/audit:verify", signal);
      setText(verdict, said.ok ? `${count(said.rows)} rows are as they were written, up to ${said.head}.` : `From row ${said.row} on: ${said.flaw}.`);
    } catch (error) {
      say(error.message);
    }
  }

  /** Phases, for as long as the page is open. */
  async function listen() {
    const known = new Map();
    while (!signal.aborted) {
      try {
        for await (const said of events(await ask("api/v1/events", { signal }))) {
          if (said.phase === undefined) continue;
          const before = known.get(said.deployment_id);
          known.set(said.deployment_id, said.phase);
          if (before === undefined || before === said.phase) continue;
          became.push(phase(said, before, (phases += 1)));
          became.splice(0, became.length - ROWS); // drawn with the next look: many may come in a second
        }
      } catch {
        // looking says what is wrong
      }
      await wait(AGAIN_MS, signal);
    }
  }
  listen();
  every(2000, signal, look, say);
}

const nameOf = (said) => said.new?.name ?? said.old?.name;

const entry = (said, names) => ({
  id: said.id,
  seq: said.seq,
  at_us: said.at_us,
  kind: said.kind,
  tenant: names.get(said.tenant_id) ?? "",
  subject: names.get(said.subject_id) ?? said.subject_id,
  whom: said.subject_id,
  change: difference(said.old, said.new),
  by: said.by,
});

const phase = (said, before, number) => ({
  id: `phase ${number}`,
  seq: Infinity,
  at_us: Date.now() * 1000,
  kind: "deployment.phase",
  tenant: said.tenant,
  subject: said.deployment,
  whom: said.deployment_id,
  change: `${before} → ${said.phase}`,
  by: "platform",
});

/** What of an object is another, as text. */
function difference(old, now) {
  if (!old || !now) return "";
  return [...new Set([...Object.keys(old), ...Object.keys(now)])]
    .filter((name) => JSON.stringify(old[name]) !== JSON.stringify(now[name]))
    .map((name) => `${name}: ${shown(old[name])} → ${shown(now[name])}`)
    .join(", ");
}

const shown = (value) => (value === undefined || value === null ? "–" : typeof value === "object" ? JSON.stringify(value) : String(value));
