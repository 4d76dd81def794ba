// Deployments: how each is, what it was asked to be, and what can be done with it.

import { all, post } from "./api.js";
import { every, h, head, Table } from "./dom.js";
import { bytes, duration } from "./format.js";

export const title = "Deployments";
export const admin = false;

const SHOWN = ["model", "digest", "dtype", "max_model_len", "slo", "priority", "scaling", "canary", "created_at"];

export function show(root, { who, signal, say }) {
  let found = [];
  let chosen = null;
  const filter = h("input", { type: "search", placeholder: "Filter", ariaLabel: "Filter by name", oninput: draw });
  const detail = h("section", { class: "detail", hidden: true, ariaLive: "polite" });
  const table = new Table(
    "Deployments",
    [
      { title: "Name", key: (one) => one.name, cell: (one) => h("button", { class: "link", onclick: () => choose(one.id) }, one.name) },
      ...(who.admin ? [{ title: "Tenant", cell: (one) => one.tenant }] : []),
      { title: "Phase", key: (one) => one.status.phase, cell: (one) => pill(one.status.phase, one.status.progress) },
      { title: "Where", cell: (one) => one.status.residency },
      { title: "Revision", number: true, cell: (one) => revisions(one.status) },
      { title: "Last cold start", number: true, cell: (one) => (one.status.last_cold_start_ms ? duration(one.status.last_cold_start_ms) : "–") },
      { title: "Notes", cell: (one) => one.status.conditions.map((condition) => condition.type).join(", ") },
      { title: "Do", key: (one) => `${one.id} ${able(one).join()}`, cell: (one) => h("span", { class: "actions" }, ...able(one).map((act) => button(one, act))) },
    ],
    "Nothing is deployed yet: `staccato deploy NAME --model MODEL` does it.",
  );
  root.append(head("Deployments", filter), table.element, detail);

  function button(one, act) {
    const element = h("button", { ariaLabel: `${act} ${one.name}`, onclick: () => order(element, one, act) }, LABELS[act]);
    return element;
  }

  async function order(element, one, act) {
    if (act === "rollback" && !confirm(`Give the traffic of ${one.name} back to its revision before ${one.status.active_revision}?`)) return;
    element.disabled = true;
    try {
      await post(`/deployments/${one.id}:${act}`);
      await look();
    } catch (error) {
      say(`${one.name}: ${error.message}`);
    }
    element.disabled = false;
  }

  function choose(id) {
    chosen = chosen === id ? null : id;
    detail.dataset.key = "";
    draw();
    if (chosen) detail.scrollIntoView({ block: "nearest" });
  }

  function draw() {
    const wanted = filter.value.toLowerCase();
    table.update(
      found.filter((one) => `${one.tenant}/${one.name}`.toLowerCase().includes(wanted)),
      (one) => one.id,
    );
    const one = found.find((each) => each.id === chosen);
    const key = JSON.stringify(one ?? null);
    if (detail.dataset.key === key) return;
    detail.dataset.key = key;
    detail.hidden = !one;
    if (one) detail.replaceChildren(...described(one));
  }

  async function look() {
    found = await all("/deployments", signal);
    draw();
  }
  every(2000, signal, look, say);
}

const LABELS = { sleep: "Sleep", wake: "Wake", rollback: "Roll back", promote: "Promote" };

/** What makes sense now; the gateway has the last word. */
function able(one) {
  const { phase, desired_state: desired, active_revision: active, target_revision: target } = one.status;
  return [
    ...(phase === "asleep" || phase === "failed" || desired === "asleep" ? ["wake"] : ["sleep"]),
    ...(target !== null && one.canary ? ["promote"] : []),
    ...(active > 1 ? ["rollback"] : []),
  ];
}

const revisions = ({ active_revision: active, target_revision: target }) => (target === null ? active : `${active} → ${target}`);

const pill = (phase, progress) => h("span", { class: `pill ${phase}` }, progress ? `${phase}, ${read(progress)}` : phase);

const read = (progress) => `${bytes(progress.done_bytes)} of ${bytes(progress.total_bytes)}`;

function described(one) {
  const facts = SHOWN.filter((name) => one[name] !== undefined && one[name] !== null).flatMap((name) => [
    h("dt", {}, name),
    h("dd", {}, typeof one[name] === "object" ? JSON.stringify(one[name]) : String(one[name])),
  ]);
  const conditions = one.status.conditions.map((condition) =>
    h("li", {}, `Revision ${condition.revision}${condition.runtime ? ` on ${condition.runtime}` : ""}: ${condition.message}`),
  );
  const events = h("a", { href: `#events?${one.id}` }, "What was done to it");
  return [h("h2", {}, `${one.tenant}/${one.name}`), h("ul", { class: "alerts" }, ...conditions), h("dl", {}, ...facts), events];
}
