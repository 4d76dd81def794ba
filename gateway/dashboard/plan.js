// Plan: what a deployment would be, before it is made.

import { all, post } from "./api.js";
import { choice, h, head, labelled, setText, Table } from "./dom.js";
import { bytes, count, duration, percent } from "./format.js";

export const title = "Plan";
export const admin = false;

export async function show(root, { who, signal, say }) {
  const owner = choice("Tenant", [], () => {});
  const model = choice("Model", [], () => {});
  const [ttft, tbt, context] = ["", "", ""].map((value) => h("input", { type: "number", min: 1, value, placeholder: "–" }));
  const verdict = h("p", { id: "fits", role: "status" });
  const facts = h("dl", { class: "inline" });
  const runtimes = new Table("Where it fits", [
    { title: "GPU", cell: (one) => one.id },
    { title: "Fits", cell: (one) => (one.fits ? "yes" : one.reason) },
    { title: "KV cache, tokens", number: true, cell: (one) => count(one.kv_tokens) },
    { title: "of which free", number: true, cell: (one) => count(one.kv_tokens_now) },
    { title: "Longest requests", number: true, cell: (one) => count(one.longest_requests) },
    ...["pages", "host", "files"].map((tier) => ({ title: `Cold from ${tier}`, number: true, cell: (one) => known(one.cold_start[tier]) })),
    { title: "A step", number: true, cell: (one) => known(one.step) },
    { title: "Busy with others", number: true, cell: (one) => percent(one.busy) },
  ]);
  const slows = new Table(
    "Whom it would meet",
    [
      { title: "Deployment", cell: (one) => (who.admin ? `${one.tenant}/${one.deployment}` : one.deployment) },
      { title: "GPU", cell: (one) => one.runtime },
      { title: "Share of its time", number: true, cell: (one) => percent(one.busy) },
    ],
    "Nobody there has requests now.",
  );
  const found = h("section", { hidden: true }, verdict, facts, h("h2", {}, "Where it fits"), runtimes.element, h("h2", {}, "Whom it would meet"), slows.element);
  const form = h(
    "form",
    {
      class: "tools",
      onsubmit: (event) => {
        event.preventDefault();
        plan();
      },
    },
    ...(who.admin ? [owner] : []),
    model,
    labelled("First token, ms", ttft),
    labelled("Between tokens, ms", tbt),
    labelled("Context, tokens", context),
    h("button", { type: "submit", class: "main" }, "Plan"),
  );
  root.append(head("Plan"), form, found);

  async function plan() {
    const slo = given({ ttft_ms: ttft, tbt_ms: tbt });
    const body = { name: "plan", model: model.select.value, ...given({ max_model_len: context }) };
    if (Object.keys(slo).length) body.slo = slo;
    if (who.admin) body.tenant = owner.select.value;
    try {
      draw(await post("/deployments:plan", body));
      say("");
    } catch (error) {
      found.hidden = true;
      say(error.message);
    }
  }

  function draw(said) {
    found.hidden = false;
    verdict.className = said.fits && !said.objective ? "" : "wrong";
    setText(verdict, [said.fits ? "It fits." : `It does not fit: ${said.reasons.join("; ")}.`, said.objective ?? ""].join(" ").trim());
    const rows = { Weights: bytes(said.weight_bytes), "KV cache written for a token": bytes(said.kv_bytes_per_token), Context: `${count(said.max_model_len)} tokens`, Price: priced(said.price) };
    facts.replaceChildren(...Object.entries(rows).flatMap(([name, text]) => [h("dt", {}, name), h("dd", {}, text)]));
    runtimes.update(said.runtimes, (one) => one.id);
    slows.update(said.slows, (one) => `${one.runtime} ${one.tenant} ${one.deployment}`);
  }

  try {
    const [models, tenants] = await Promise.all([all("/models", signal), who.admin ? all("/tenants", signal) : []]);
    const ready = [...new Set(models.filter((one) => one.state === "ready").map((one) => one.name))];
    model.select.append(...ready.map((name) => h("option", { value: name }, name)));
    owner.select.append(...tenants.map((one) => h("option", { value: one.name }, one.name)));
  } catch (error) {
    say(error.message);
  }
}

const known = ({ ms, by }) => (ms === null ? "–" : `${duration(ms)}${by === "measured" ? "" : ` (${by})`}`);

/** What was filled in, as numbers. */
const given = (fields) => Object.fromEntries(Object.entries(fields).filter(([, field]) => field.value).map(([name, field]) => [name, Number(field.value)]));

const PER_MILLION = 1e6;
const PICO = 1e12;

function priced(price) {
  if (!price) return "none yet";
  const of = (pico, times) => ((pico * times) / PICO).toPrecision(3);
  return `${of(price.prompt_pico, PER_MILLION)} and ${of(price.output_pico, PER_MILLION)} ${price.currency} for a million tokens in and out, ${of(price.gpu_s_pico, 1)} for a second of a GPU`;
}
