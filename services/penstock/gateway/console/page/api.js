// What the page asks the gateway. The key is in memory and in sessionStorage, which ends with the tab, and goes out in a
// header alone.

const NAME = "penstock operator key";
let key = sessionStorage.getItem(NAME) ?? "";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function hasKey() {
  return key !== "";
}

export function useKey(given) {
  key = given;
  if (given) sessionStorage.setItem(NAME, given);
  else sessionStorage.removeItem(NAME);
}

export function bearer(given) {
  return given ? { authorization: `Bearer ${given}` } : {};
}

/** The answer to a request, when it is a good one. */
export async function answered(response) {
  if (response.ok) return response;
  const said = await response.json().catch(() => ({}));
  throw new Refused(response.status, said.error?.message ?? `the gateway answers ${response.status}`);
}

/** An object of /console/api. */
export async function ask(path, signal) {
  const response = await fetch(`/console/api/${path}`, { headers: bearer(key), signal, cache: "no-store" });
  return (await answered(response)).json();
}
