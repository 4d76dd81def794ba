// Deployments: how each is, what it was asked to be, and what can be done with it.

import { all, post } from "./api.js";
import { every, h, head, Table } from "./dom.js";
import { bytes, duration } from "./format.js";

export const title = "Deployments";
export const admin = false;

const SPEC = ["model", "digest", "dtype", "max_model_len", "slo", "priority", "scaling", "tool_parser", "reasoning_parser",
  "language_model_only", "keep_prefixes", "warm"];

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
      { title: "Model", cell: (one) => one.model },
      { title: "Phase", key: (one) => one.status.phase, cell: (one) => pill(one.status.phase, one.status.progress) },
      { title: "Where", cell: (one) => one.status.residency },
      { title: "Revision", number: true, cell: revisions },
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
    if (act === "rollback" && !confirm(rollbackOf(one))) return;
    element.disabled = true;
    try {
      const answer = await post(`/deployments/${one.id}:${act}`);
      await look();
      for (const { message } of answer.status.conditions.filter(({ type }) => type === "EngineShared")) say(`${one.name}: ${message}`);
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

/** What makes sense now; the gateway has the last word. The phase alone counts: a request wakes what was ordered to sleep. */
function able({ status, target }) {
  return [
    ...(status.phase === "asleep" || status.phase === "failed" ? ["wake"] : ["sleep"]),
    ...(target?.canary ? ["promote"] : []),
    ...(target || status.active_revision > 1 ? ["rollback"] : []),
  ];
}

/** What a roll-back does, as a question: a target is given up, and only without one the active revision changes. */
const rollbackOf = ({ name, status, target }) =>
  target
    ? `Give up revision ${target.revision} of ${name}? Revision ${status.active_revision} keeps all requests.`
    : `Give the requests of ${name} back to the revision before ${status.active_revision}?`;

function revisions({ status, target }) {
  if (!target) return status.active_revision;
  return `${status.active_revision} → ${target.revision}${target.canary ? ` (${target.canary.weight} %)` : ""}`;
}

const pill = (phase, progress) => h("span", { class: `pill ${phase}` }, progress ? `${phase}, ${read(progress)}` : phase);

const read = (progress) =>
  (progress.waits_for ?? `${bytes(progress.done_bytes)} of ${bytes(progress.total_bytes)}`) +
  (progress.eta_s === null || progress.eta_s === undefined ? "" : `, about ${progress.eta_s} s`);

function described(one) {
  const { target } = one;
  const conditions = one.status.conditions.map((condition) =>
    h("li", {}, `Revision ${condition.revision}${condition.runtime ? ` on ${condition.runtime}` : ""}: ${condition.message}`),
  );
  const events = h("p", {}, h("a", { href: `#events?${one.id}` }, "What was done to it"));
  const facts = { ...pick(one, SPEC), last_order: one.status.desired_state, created_at: one.created_at };
  const parts = [h("h2", {}, `${one.tenant}/${one.name}, revision ${one.status.active_revision}`), h("ul", { class: "alerts" }, ...conditions), list(facts)];
  if (target) {
    const share = target.canary ? `, the canary: ${target.canary.weight} % of the requests` : ", takes over once a runtime has loaded it";
    const differing = SPEC.filter((name) => JSON.stringify(target[name]) !== JSON.stringify(one[name]));
    parts.push(h("h2", {}, `Revision ${target.revision}${share}`), list(pick(target, differing)));
  }
  return [...parts, events];
}

const pick = (row, names) => Object.fromEntries(names.map((name) => [name, row[name]]));

const list = (facts) =>
  h(
    "dl",
    {},
    ...Object.entries(facts)
      .filter(([, value]) => value !== undefined && value !== null)
      .flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, typeof value === "object" ? JSON.stringify(value) : String(value))]),
  );
