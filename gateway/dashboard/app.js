// Login, navigation, theme; which page is shown stands behind the # of the address.

import { get, key, Refused } from "./api.js";
import { h, setText } from "./dom.js";
import * as now from "./now.js";
import * as timeline from "./timeline.js";
import * as pagemap from "./pagemap.js";
import * as deployments from "./deployments.js";
import * as coldstarts from "./coldstarts.js";
import * as objectives from "./objectives.js";
import * as usage from "./usage.js";
import * as plan from "./plan.js";
import * as events from "./events.js";
import * as playground from "./playground.js";

const PAGES = { now, timeline, pages: pagemap, deployments, plan, events, "cold-starts": coldstarts, objectives, usage, playground };
const THEMES = ["", "light", "dark"];

let leaving = new AbortController();
let who = null;

async function start() {
  theme(sessionStorage.getItem("staccato.theme") ?? "");
  if (!key.get()) return login();
  try {
    who = await get("/me");
  } catch (error) {
    if (error instanceof Refused && error.status < 500) key.forget();
    return login(error.message);
  }
  frame();
}

function theme(name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
  sessionStorage.setItem("staccato.theme", name);
}

function login(wrong = "") {
  const field = h("input", {
    type: "password",
    id: "key",
    autocomplete: "off",
    spellcheck: false,
    required: true,
  });
  const said = h("p", { class: "wrong", role: "alert" }, wrong);
  const form = h(
    "form",
    {
      class: "login",
      onsubmit: (event) => {
        event.preventDefault();
        key.set(field.value.trim());
        start();
      },
    },
    h("h1", {}, h("span", { class: "mark", ariaHidden: "true" }), "Staccato"),
    h("label", { htmlFor: "key" }, "Admin key, or a tenant's key with the scope control"),
    field,
    h("button", { type: "submit", class: "main" }, "Sign in"),
    said,
    h("p", { class: "quiet" }, "The key stays in this tab, and is forgotten with it."),
  );
  document.body.replaceChildren(h("main", { class: "center" }, form));
  field.focus();
}

function frame() {
  const links = Object.entries(PAGES)
    .filter(([, page]) => who.admin || !page.admin)
    .map(([name, page]) => h("a", { href: `#${name}`, id: `to-${name}` }, page.title));
  const said = h("p", { class: "wrong", role: "status", id: "said" });
  const root = h("main", { id: "page", tabIndex: -1 });
  const nav = h(
    "nav",
    { ariaLabel: "Pages" },
    h("a", { href: "#", class: "brand" }, h("span", { class: "mark", ariaHidden: "true" }), "Staccato"),
    ...links,
    h("span", { class: "gap" }),
    h("p", { class: "who" }, who.admin ? "operator" : who.tenant),
    themeButton(),
    h("button", { class: "link", onclick: leave }, "Sign out"),
  );
  const skip = h("button", { class: "skip", onclick: () => root.focus() }, "Skip to the page");
  document.body.replaceChildren(h("div", { class: "frame" }, skip, nav, h("div", {}, said, root)));
  window.onhashchange = () => show(links, root, said);
  show(links, root, said);
}

function themeButton() {
  const names = { "": "Theme: system", light: "Theme: light", dark: "Theme: dark" };
  const button = h("button", { class: "link" }, names[document.documentElement.dataset.theme ?? ""]);
  button.addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "") + 1) % THEMES.length];
    theme(next);
    setText(button, names[next]);
    window.onhashchange?.();
  });
  return button;
}

function leave() {
  key.forget();
  leaving.abort();
  window.onhashchange = null;
  location.hash = "";
  login();
}

function show(links, root, said) {
  leaving.abort();
  leaving = new AbortController();
  const allowed = links.map((link) => link.hash.slice(1));
  const [wanted] = location.hash.slice(1).split("?");
  const name = allowed.includes(wanted) ? wanted : allowed[0];
  for (const link of links) {
    if (link.hash === `#${name}`) {
      link.setAttribute("aria-current", "page");
      link.scrollIntoView({ block: "nearest", inline: "nearest" }); // on a phone the row of pages scrolls
    } else link.removeAttribute("aria-current");
  }
  document.title = `${PAGES[name].title} · Staccato`;
  root.replaceChildren();
  root.dataset.page = name;
  const { signal } = leaving;
  PAGES[name].show(root, { who, signal, say: (text) => signal.aborted || setText(said, text) });
}

start();
