// How models came to the device: for each way its stages, and for each model how long they take. Ways are named by
// the deployments of that time.

import { all } from "./api.js";
import { colorOf } from "./draw.js";
import { bar, dot, every, h, head, Table } from "./dom.js";
import { clock, duration } from "./format.js";
import { gpuIds, nameOf, timelineOf } from "./fleet.js";

export const title = "Cold starts";
export const admin = false;

const HOURS = 24;
const WAYS_MOST = 20; // of each kind
const NEXT = { build: [], fetch: ["build"], check: ["build", "fetch"] }; // what may have come before, on the same way

export function show(root, context) {
  if (!context.who.admin) return ofTenant(root, context);
  const { signal, say } = context;
  const stages = new Table(
    "Stages by model",
    [
      { title: "Model", key: (row) => row.key, cell: (row) => h("span", {}, dot(colorOf(row.model)), row.name) },
      { title: "Stage", cell: (row) => row.stage },
      { title: "Times", number: true, cell: (row) => row.times.length },
      { title: "Median", number: true, cell: (row) => duration(quantile(row.times, 0.5) / 1000) },
      { title: "p95", number: true, cell: (row) => duration(quantile(row.times, 0.95) / 1000) },
      { title: "Longest", number: true, cell: (row) => duration(row.times.at(-1) / 1000) },
    ],
    `No model came to a device in the last ${HOURS} hours.`,
  );
  const built = h("ol", { class: "ways" });
  const fetched = h("ol", { class: "ways" });
  root.append(
    head("Cold starts", h("ul", { class: "legend" }, ...Object.keys(NEXT).map((name) => h("li", {}, h("span", { class: `dot ${name}` }), SAID[name])))),
    h("h2", {}, "Engines that were built"),
    built,
    h("h2", {}, "From the host's memory"),
    fetched,
    h("h2", {}, "By model and stage"),
    stages.element,
  );
  every(
    5000,
    signal,
    async () => {
      const to = Date.now() * 1000;
      const ids = await gpuIds(signal);
      const answers = await Promise.all(ids.map((id) => timelineOf(id, to - HOURS * 3600e6, to, signal)));
      const made = answers.flatMap((answer, index) => grouped(answer.stages, ids[index]));
      made.sort((a, b) => b.at - a.at);
      const begins = (way) => way.stages[0].name === "build";
      draw(built, made.filter(begins).slice(0, WAYS_MOST));
      draw(fetched, made.filter((way) => !begins(way)).slice(0, WAYS_MOST));
      stages.update(totals(answers), (row) => row.key);
    },
    say,
  );
}

const SAID = { build: "build the engine", fetch: "host to device", check: "golden check" };

/** A way begins with a build, or with a fetch that no build went ahead of. */
function grouped(stages, gpu) {
  const open = new Map();
  const ways = [];
  for (const stage of [...stages].sort((a, b) => a.at_us - b.at_us)) {
    const way = open.get(stage.model);
    const fits = way && !way.stages.some((one) => !NEXT[stage.name].includes(one.name));
    if (fits) way.stages.push(stage);
    else {
      const begun = { gpu, model: stage.model, at: stage.at_us, stages: [stage] };
      open.set(stage.model, begun);
      ways.push(begun);
    }
  }
  return ways;
}

const end = (way) => Math.max(...way.stages.map((stage) => stage.at_us + stage.us));

function draw(list, ways) {
  const longest = Math.max(1, ...ways.map((way) => end(way) - way.at));
  const key = ways.map((way) => `${way.gpu}${way.at}${way.stages.length}`).join();
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  list.replaceChildren(
    ...ways.map((way) => {
      const bars = way.stages.map((stage) => {
        const element = h("span", { class: `stage ${stage.name}`, title: `${SAID[stage.name]}: ${duration(stage.us / 1000)}` });
        element.style.left = `${((stage.at_us - way.at) / longest) * 100}%`;
        element.style.width = `max(2px, ${(stage.us / longest) * 100}%)`;
        return element;
      });
      const said = way.stages.map((stage) => `${stage.name} ${duration(stage.us / 1000)}`).join(" · ");
      return h(
        "li",
        {},
        h("span", { class: "when" }, clock(way.at, true)),
        h("span", { class: "what" }, `${loadedFor(way.stages[0])} on ${way.gpu}`),
        h("span", { class: "waterfall", role: "img", ariaLabel: said }, ...bars),
        h("span", { class: "number" }, duration((end(way) - way.at) / 1000)),
      );
    }),
  );
}

/** Whom the model was brought in for then: later the same engine may serve another deployment. */
const loadedFor = (stage) => nameOf(stage.deployments, stage.model);

function totals(answers) {
  const rows = new Map();
  for (const stage of answers.flatMap((answer) => answer.stages)) {
    const name = loadedFor(stage);
    const key = `${stage.model} ${name} ${stage.name}`;
    if (!rows.has(key)) rows.set(key, { key, model: stage.model, name, stage: stage.name, times: [] });
    rows.get(key).times.push(stage.us);
  }
  const sorted = [...rows.values()].sort((a, b) => (a.name + a.stage < b.name + b.stage ? -1 : 1));
  for (const row of sorted) row.times.sort((a, b) => a - b);
  return sorted;
}

const quantile = (sorted, share) => sorted[Math.min(sorted.length - 1, Math.ceil(share * sorted.length) - 1)];

/** What the deployments of a tenant say: the stages are the operator's to see. */
function ofTenant(root, { signal, say }) {
  let longest = 1;
  const table = new Table("Cold starts", [
    { title: "Deployment", cell: (one) => one.name },
    { title: "Phase", cell: (one) => one.status.phase },
    {
      title: "The last one took",
      key: (one) => `${one.status.last_cold_start_ms} ${longest}`,
      cell: (one) => (one.status.last_cold_start_ms ? bar(one.status.last_cold_start_ms / longest, duration(one.status.last_cold_start_ms)) : h("span", {}, "–")),
    },
  ]);
  root.append(head("Cold starts"), table.element);
  every(
    5000,
    signal,
    async () => {
      const found = await all("/deployments", signal);
      longest = Math.max(1, ...found.map((one) => one.status.last_cold_start_ms ?? 0));
      table.update(found, (one) => one.id);
    },
    say,
  );
}
