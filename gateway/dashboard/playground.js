// Chat with a deployment. What it says is text, whatever it says.

import { all, ask, events } from "./api.js";
import { choice, h, head, labelled, setText } from "./dom.js";
import { duration } from "./format.js";

export const title = "Playground";
export const admin = false;

export async function show(root, { who, signal, say }) {
  let found = [];
  let answering = null;
  const history = [];
  const select = choice("Deployment", [], clear);
  const most = h("input", { type: "number", min: 1, max: 4096, value: 128 });
  const heat = h("input", { type: "number", min: 0, max: 2, step: 0.1, value: 0 });
  const talk = h("ol", { class: "talk", ariaLive: "polite", ariaLabel: "Conversation" });
  const field = h("textarea", { rows: 3, required: true, placeholder: "Say something. Ctrl+Enter sends.", ariaLabel: "Message" });
  const send = h("button", { type: "submit", class: "main" }, "Send");
  const stop = h("button", { type: "button", disabled: true, onclick: () => answering?.abort() }, "Stop");
  const form = h(
    "form",
    {
      class: "ask",
      onsubmit: (event) => {
        event.preventDefault();
        if (!answering && field.value.trim()) turn();
      },
    },
    field,
    h("div", { class: "tools" }, send, stop, h("button", { type: "button", onclick: clear }, "Clear")),
  );
  field.addEventListener("keydown", (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && form.requestSubmit());
  root.append(head("Playground", select, labelled("Tokens at most", most), labelled("Temperature", heat)), talk, form);
  signal.addEventListener("abort", () => answering?.abort());

  function clear() {
    answering?.abort();
    history.length = 0;
    talk.replaceChildren(h("li", { class: "quiet" }, "The conversation is kept in this page alone."));
  }
  clear();

  async function turn() {
    const one = found.find((each) => each.id === select.select.value);
    if (!one) return say("there is no deployment to talk to");
    if (!history.length) talk.replaceChildren();
    history.push({ role: "user", content: field.value });
    talk.append(h("li", { class: "user" }, h("p", {}, field.value)));
    field.value = "";
    const said = h("p");
    const facts = h("p", { class: "quiet small" }, "waiting …");
    talk.append(h("li", { class: "model" }, said, facts));
    answering = new AbortController();
    send.disabled = true;
    stop.disabled = false;
    try {
      history.push({ role: "assistant", content: await answer(one, said, facts, answering.signal) });
      say("");
    } catch (error) {
      const stopped = error.name === "AbortError";
      history.pop();
      setText(facts, stopped ? "stopped" : error.message);
      facts.classList.toggle("wrong", !stopped);
    }
    answering = null;
    send.disabled = false;
    stop.disabled = true;
    field.focus();
  }

  async function answer(one, said, facts, stopped) {
    const began = performance.now();
    let first = null;
    let usage = null;
    const path = who.admin ? `t/${encodeURIComponent(one.tenant)}/v1/chat/completions` : "v1/chat/completions";
    const body = {
      model: one.name,
      messages: history,
      stream: true,
      stream_options: { include_usage: true },
      max_tokens: Number(most.value),
      temperature: Number(heat.value),
    };
    const response = await ask(path, { method: "POST", body, signal: stopped });
    const cold = response.headers.get("x-staccato-cold") ?? "none";
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const text = event.choices?.[0]?.delta?.content;
      if (!text) continue;
      first ??= performance.now();
      said.append(text);
      talk.lastElementChild.scrollIntoView({ block: "nearest" });
    }
    const took = performance.now() - (first ?? began);
    const tokens = usage?.completion_tokens ?? 0;
    const speed = tokens > 1 ? ` · ${((tokens - 1) / (took / 1000)).toFixed(1)} tokens/s` : "";
    const start = cold === "none" ? "warm" : `from ${cold}`;
    setText(facts, `first token ${duration((first ?? performance.now()) - began)} · ${tokens} tokens${speed} · ${start}`);
    return said.textContent;
  }

  try {
    found = await all("/deployments", signal);
  } catch (error) {
    return signal.aborted || say(error.message);
  }
  select.select.append(...found.map((one) => h("option", { value: one.id }, who.admin ? `${one.tenant}/${one.name}` : one.name)));
}
