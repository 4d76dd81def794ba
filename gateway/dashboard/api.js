// The control plane, asked with the key that was given at login. The key lives in this tab's session alone.

const KEY = "staccato.key";

export class Refused extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

/** Relative to the page, so that a prefix of a proxy does no harm. */
export async function ask(path, { method = "GET", body, signal, headers = {} } = {}) {
  const sent = { authorization: `Bearer ${key.get()}`, ...headers };
  if (body !== undefined) sent["content-type"] = "application/json";
  const answer = await fetch(path, {
    method,
    signal,
    headers: sent,
    body: body === undefined ? undefined : JSON.stringify(body),
    cache: "no-store",
    credentials: "omit",
  });
  if (!answer.ok) throw await refusal(answer);
  return answer;
}

async function refusal(answer) {
  let said = {};
  try {
    said = await answer.json();
  } catch {
    // a proxy's page, or nothing
  }
  return new Refused(answer.status, said.detail ?? said.error?.message ?? `HTTP ${answer.status}`);
}

export const get = async (path, signal) => (await ask(`api/v1${path}`, { signal })).json();

export const post = async (path, body = {}) => (await ask(`api/v1${path}`, { method: "POST", body })).json();

/** All pages of a list. */
export async function all(path, signal) {
  const found = [];
  let cursor = null;
  do {
    const more = cursor ? `&cursor=${encodeURIComponent(cursor)}` : "";
    const page = await get(`${path}?limit=200${more}`, signal);
    found.push(...page.data);
    cursor = page.next_cursor;
  } while (cursor);
  return found;
}

/** Events of an SSE answer, as parsed JSON. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (left + value).split("\n");
    left = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}
