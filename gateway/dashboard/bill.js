// What a month costs: usage and corrections by currency, and whether the bill's export says the same. Amounts are exact.

import { exact, money } from "./format.js";

const NANO = exact("0.000000001"); // a row of the usage is rounded to 12 places, a line of the bill is not
const CORRECTION = "correction"; // the sku of a correction's line

/** Currency → sum of the amounts. A row without a currency had no price and cost nothing. */
export function totals(rows) {
  const sums = new Map();
  for (const { currency, amount } of rows) {
    if (currency) sums.set(currency, (sums.get(currency) ?? 0n) + exact(amount));
  }
  return sums;
}

/** The cost of a month: `usage` and `corrections` are rows with an amount and a currency, corrections those on the month's bill. */
export function costOf(usage, corrections) {
  const used = totals(usage);
  const corrected = totals(corrections);
  const currencies = [...new Set([...used.keys(), ...corrected.keys()])].sort();
  const together = new Map(currencies.map((currency) => [currency, (used.get(currency) ?? 0n) + (corrected.get(currency) ?? 0n)]));
  return { used, corrected, together, currencies };
}

/** { equal, sentence }: holds the cost that is shown against all lines of the month's export, corrections included. */
export function compared(cost, lines, month) {
  const unrounded = (which) => totals(lines.filter(which).map((line) => ({ ...line, amount: line.unrounded })));
  const billed = unrounded(() => true);
  const late = unrounded((line) => line.sku !== CORRECTION && line.month !== month);
  const currencies = [...new Set([...billed.keys(), ...cost.currencies])].sort();
  const said = (sums, places = 9) => currencies.filter((one) => sums.has(one)).map((one) => `${money(sums.get(one), places)} ${one}`).join(", ") || "nothing";
  const apart = (one) => (billed.get(one) ?? 0n) - (cost.together.get(one) ?? 0n);
  const equal = currencies.every((one) => apart(one) <= NANO && apart(one) >= -NANO);
  const corrections = cost.corrected.size ? `, of which corrections ${said(cost.corrected, 2)}` : "";
  if (equal) return { equal, sentence: `Equal to the export: ${said(billed)}${corrections}.` };
  const earlier = late.size ? ` Of the export, ${said(late)} is usage of earlier months that was booked after their bills were closed.` : "";
  return { equal, sentence: `Not equal to the export: the export has ${said(billed)}, this page has ${said(cost.together)}.${earlier}` };
}
