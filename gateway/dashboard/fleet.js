// What several pages ask of the runtimes.

import { get } from "./api.js";

export const gpus = async (signal) => (await get("/gpus", signal)).data;

let last = { at: -Infinity, ids: [] };

/** Of the GPUs; asked every ten seconds. */
export async function gpuIds(signal) {
  if (performance.now() - last.at > 10_000) {
    last = { at: performance.now(), ids: (await gpus(signal)).map((gpu) => gpu.id) };
  }
  return last.ids;
}

/** A model is called by the deployments that it serves. */
export function nameOf(names, key) {
  if (key === "") return "others";
  if (!names || names.length === 0) return key.slice(0, 12);
  return names.length === 1 ? names[0] : `${names[0]} +${names.length - 1}`;
}

export async function timelineOf(gpu, fromUs, toUs, signal) {
  const answer = await get(`/gpus/${encodeURIComponent(gpu)}/timeline?from=${moment(fromUs)}&to=${moment(toUs)}`, signal);
  for (const span of answer.spans) span.model ??= ""; // what is empty is not sent
  return answer;
}

/** RFC 3339 to the microsecond. */
export function moment(us) {
  const ms = Math.floor(us / 1000);
  const rest = String(Math.round(us - ms * 1000)).padStart(3, "0");
  return new Date(ms).toISOString().replace("Z", `${rest}Z`);
}
