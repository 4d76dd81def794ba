// Numbers and times as people read them.

const LOCALE = "en-GB";
const whole = new Intl.NumberFormat(LOCALE, { maximumFractionDigits: 0 });

export const count = (n) => (n === null ? "–" : whole.format(n));

export function bytes(n) {
  const unit = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (n >= 1024 && power < unit.length - 1) {
    n /= 1024;
    power += 1;
  }
  return `${n >= 100 || power === 0 ? Math.round(n) : n.toFixed(1)} ${unit[power]}`;
}

export function duration(ms) {
  const size = Math.abs(ms);
  if (size < 1) return `${Math.round(ms * 1000)} µs`;
  if (size < 1000) return `${size < 10 ? ms.toFixed(1) : Math.round(ms)} ms`;
  if (size < 60_000) return `${(ms / 1000).toFixed(size < 10_000 ? 2 : 1)} s`;
  if (size < 3_600_000) return `${(ms / 60_000).toFixed(1)} min`;
  return `${(ms / 3_600_000).toFixed(1)} h`;
}

export const percent = (share) => (share === 1 ? "100 %" : `${(share * 100).toFixed(share > 0.995 ? 2 : 1)} %`);

export const clock = (us, withDay = false) =>
  new Date(us / 1000).toLocaleString(LOCALE, {
    ...(withDay ? { day: "2-digit", month: "short" } : {}),
    hour: "2-digit",
    minute: "2-digit",
    second: "2-digit",
  });

/** The day in UTC, as 24 Nov. */
export const dayOf = (us) => new Date(us / 1000).toLocaleDateString(LOCALE, { day: "2-digit", month: "short", timeZone: "UTC" });

/** 1 GPU, 2 GPUs. */
export const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

// Money comes as decimal strings, and is added up as integers: no binary fraction comes near it.

const PLACES = 24;

export function exact(text) {
  const [, sign, units, fraction = ""] = /^(-?)(\d+)(?:\.(\d+))?$/.exec(text);
  return BigInt(`${sign}${units}${fraction.padEnd(PLACES, "0").slice(0, PLACES)}`);
}

/** To the micro-unit unless all is asked for. */
export function money(amount, places = 6) {
  const step = 10n ** BigInt(PLACES - places);
  const size = ((amount < 0n ? -amount : amount) + step / 2n) / step;
  const digits = size.toString().padStart(places + 1, "0");
  return `${amount < 0n && size ? "-" : ""}${digits.slice(0, -places)}.${digits.slice(-places)}`;
}
