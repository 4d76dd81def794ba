// Canvas, colours and charts. Colours come from the stylesheet's variables, a model's hue from the order in which it came.

import { clock, dayOf } from "./format.js";

const hues = new Map();

const prefersDark = matchMedia("(prefers-color-scheme: dark)");

const dark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : prefersDark.matches;
};

/** Neighbours in order are far apart on the wheel. */
export function hue(model) {
  if (!hues.has(model)) hues.set(model, (250 + hues.size * 137.508) % 360);
  return hues.get(model);
}

/** What was looked up once, until the theme is another. */
let known = { light: null, colors: new Map() };

function once(name, look) {
  const light = !dark();
  if (known.light !== light) known = { light, colors: new Map() };
  if (!known.colors.has(name)) known.colors.set(name, look());
  return known.colors.get(name);
}

export const colorOf = (model, strength = 1) =>
  model === ""
    ? variable("--others")
    : once(`${model} ${strength}`, () => `oklch(${dark() ? 0.7 : 0.66} 0.115 ${hue(model).toFixed(1)} / ${strength})`);

export const variable = (name) =>
  once(name, () => getComputedStyle(document.documentElement).getPropertyValue(name).trim());

/** As large as its box, sharp on any screen; what is drawn is in CSS pixels. */
export function prepare(canvas, height) {
  const ratio = devicePixelRatio || 1;
  const width = canvas.parentElement.clientWidth;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = `11px ${variable("--font")}`;
  return { context, width };
}

export function hatch(context, x, y, width, height, color) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.strokeStyle = color;
  context.lineWidth = 1;
  context.beginPath();
  for (let at = x - height; at < x + width; at += 5) {
    context.moveTo(at, y + height);
    context.lineTo(at + height, y);
  }
  context.stroke();
  context.restore();
}

const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600].concat([1, 2, 5, 7, 14].map((days) => days * 86_400)); // s
const WHOLE = Array.from({ length: 36 }, (_, place) => [1, 2, 5][place % 3] * 10 ** Math.floor(place / 3));
const LEAST = 10; // a chart of zeros goes up to here

/** A chart over time in whole numbers. `series`: { label, color }; `update([xs, ...ys])` with xs in UNIX seconds.

With `bars` each x is a day, UTC; else the last `windowS` seconds are shown. */
export function chart(box, series, { height = 160, bars = false, windowS = 180, value = String } = {}) {
  const axis = { stroke: variable("--quiet"), grid: { stroke: variable("--line"), width: 1 }, ticks: { show: false }, font: `11px ${variable("--font")}` };
  const range = bars ? (_, first, last) => [first - 43_200, last + 43_200] : (_, first, last) => [last - windowS, last];
  const options = {
    width: box.clientWidth,
    height,
    cursor: { y: false, points: { size: 6 } },
    legend: { show: false },
    scales: { x: { time: false, range }, y: { range: (_, low, high) => [0, Math.max(high, LEAST) * 1.1] } },
    axes: [
      { ...axis, incrs: STEPS, space: 72, values: (_, ticks) => ticks.map((at) => (bars ? dayOf(at * 1e6) : clock(at * 1e6))) },
      { ...axis, incrs: WHOLE, space: 26, size: 64, values: (_, ticks) => ticks.map(value) },
    ],
    series: [
      {},
      ...series.map(({ label, color }) => ({
        label,
        stroke: color,
        fill: bars ? color : undefined,
        width: 1.5,
        points: { show: false },
        paths: bars ? uPlot.paths.bars({ size: [0.7, 42] }) : undefined,
      })),
    ],
  };
  const plot = new uPlot(options, [[], ...series.map(() => [])], box);
  const sized = new ResizeObserver(() => plot.setSize({ width: box.clientWidth, height }));
  sized.observe(box);
  box.plot = plot; // for whoever looks at the page from outside: a canvas shows no text
  return {
    update: (data) => plot.setData(data),
    close: () => (sized.disconnect(), plot.destroy()),
  };
}
