// Elements, tables and what repeats. Text becomes text: nothing here, and nothing in the dashboard, parses markup.

/** h("p", { class: "quiet", onclick }, "text", child) */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && name !== "list") element[name] = value;
    else if (value !== undefined) element.setAttribute(name === "class" ? "class" : name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Again and again until the page is left; not while nobody sees it. What fails is said and tried again. */
export async function every(ms, signal, act, say) {
  while (!signal.aborted) {
    const began = performance.now();
    if (!document.hidden) {
      try {
        await act();
        say("");
      } catch (error) {
        if (signal.aborted) return;
        say(error.message);
      }
    }
    await wait(Math.max(100, ms - (performance.now() - began)), signal);
  }
}

export const wait = (ms, signal) =>
  new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal?.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });

/** `columns`: { title, cell: row → text or element, number?: true, key?: row → what an element depends on }. */
export class Table {
  constructor(caption, columns, empty = "Nothing yet.") {
    this.columns = columns;
    this.body = h("tbody");
    this.empty = h("p", { class: "quiet" }, empty);
    const titles = columns.map((column) => h("th", { scope: "col", class: column.number ? "number" : "" }, column.title));
    this.table = h("table", {}, h("caption", { class: "unseen" }, caption), h("thead", {}, h("tr", {}, ...titles)), this.body);
    this.element = h("div", { class: "table" }, this.table, this.empty);
    this.rows = new Map();
  }

  /** Rows keep their elements, and with them focus and selection, by their key. */
  update(rows, keyOf) {
    const seen = new Set();
    rows.forEach((row, place) => {
      const key = keyOf(row);
      seen.add(key);
      let known = this.rows.get(key);
      if (!known) {
        const cells = this.columns.map((column) => h("td", { class: column.number ? "number" : "" }));
        known = { line: h("tr", {}, ...cells), cells, keys: [] };
        this.rows.set(key, known);
      }
      this.columns.forEach((column, index) => fill(known, index, column, row));
      if (this.body.children[place] !== known.line) this.body.insertBefore(known.line, this.body.children[place] ?? null);
    });
    for (const [key, { line }] of this.rows) {
      if (!seen.has(key)) {
        line.remove();
        this.rows.delete(key);
      }
    }
    this.table.hidden = rows.length === 0;
    this.empty.hidden = rows.length > 0;
  }
}

function fill(known, index, column, row) {
  const cell = known.cells[index];
  if (!column.key) return setText(cell, String(column.cell(row)));
  const key = column.key(row);
  if (known.keys[index] === key) return;
  known.keys[index] = key;
  cell.replaceChildren(column.cell(row));
}

/** A share from 0 to 1 as a bar with its number. */
export function bar(share, text, kind = "") {
  const fill = h("span", { class: `fill ${kind}` });
  fill.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return h("span", { class: "bar" }, h("span", { class: "track" }, fill), h("span", { class: "value" }, text));
}

export const dot = (color) => {
  const element = h("span", { class: "dot", ariaHidden: "true" });
  element.style.background = color;
  return element;
};

export const head = (title, ...right) => h("header", { class: "page" }, h("h1", {}, title), h("div", { class: "tools" }, ...right));

export function choice(label, options, onchange) {
  const select = h("select", { onchange: () => onchange(select.value) });
  for (const [value, text] of options) select.append(h("option", { value }, text));
  return Object.assign(h("label", { class: "choice" }, h("span", {}, label), select), { select });
}

export const labelled = (text, input) => h("label", { class: "choice" }, h("span", {}, text), input);
