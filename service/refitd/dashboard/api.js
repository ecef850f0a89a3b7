// The service's API. The token is asked for when the service wants one, and kept for this tab alone.

const KEY = "refitd-token";

/** A request that failed: the service answered with a problem document (RFC 9457), or did not answer. */
export class Problem extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }

  /** Whether another token might help. */
  get wantsToken() {
    return this.status === 401 || (this.status === 403 && this.slug === "insufficient-scope");
  }

  /** Whether the same request may be answered in a moment. */
  get mayPass() {
    return this.status === 0 || this.status === 408 || this.status === 429 || this.status >= 500;
  }
}

export const hasToken = () => sessionStorage.getItem(KEY) !== null;
export const keepToken = (token) => sessionStorage.setItem(KEY, token);
export const dropToken = () => sessionStorage.removeItem(KEY);

/** The headers of a request, with the token where there is one. */
export function headers(more = {}) {
  const token = sessionStorage.getItem(KEY);
  return token === null ? more : { ...more, Authorization: `Bearer ${token}` };
}

/** Why an answer is no good. */
export async function problemOf(response) {
  const document = await response.json().catch(() => ({}));
  const problem = new Problem(response.status, document.detail ?? `the service answers ${response.status}`);
  problem.slug = (document.type ?? "").split(":").pop();
  return problem;
}

async function ask(method, path, body) {
  const sent = body === undefined ? headers() : headers({ "Content-Type": "application/json" });
  const options = { method, headers: sent, cache: "no-store" };
  if (body !== undefined) options.body = JSON.stringify(body);
  const response = await orProblem(fetch(path, options), "the service does not answer");
  if (!response.ok) throw await problemOf(response);
  return response.status === 204 ? null : orProblem(response.json(), "the service's answer broke off");
}

async function orProblem(answer, detail) {
  try {
    return await answer;
  } catch {
    throw new Problem(0, detail);
  }
}

const id = encodeURIComponent;
const given = (query) => new URLSearchParams(Object.entries(query).filter(([, value]) => value)).toString();

export const overview = () => ask("GET", "/v1/overview");
export const versions = (query) => ask("GET", `/v1/versions?${given({ ...query, engines: "false" })}`);
export const attempts = (version) => ask("GET", `/v1/versions/${id(version)}/attempts`);
export const explain = (subject) => ask("GET", `/v1/explain/${id(subject)}`);
export const history = (query) => ask("GET", `/v1/history?${given(query)}`);
export const engineHistory = (engine, limit) => ask("GET", `/v1/history/engines/${id(engine)}?limit=${limit}`);
export const log = (query) => ask("GET", `/v1/log?${given(query)}`);
export const plan = () => ask("GET", "/v1/reclaim/plan");

export const pin = (version) => ask("PUT", `/v1/versions/${id(version)}/pin`);
export const unpin = (version) => ask("DELETE", `/v1/versions/${id(version)}/pin`);
export const rollback = (run, to) => ask("POST", "/v1/rollback", to === undefined ? { run } : { run, to });
export const rollbackPlan = (run, to) => ask("GET", `/v1/rollback?${given({ run, to })}`);
export const resync = (engine) => ask("POST", `/v1/engines/${id(engine)}/resync`);
export const move = (engines, run) => ask("POST", "/v1/engines/move", { engines, run, insist: true });
export const closeRun = (run) => ask("POST", "/v1/runs", { run, closed: true });
export const reopenRun = (run) => ask("POST", "/v1/runs", { run, closed: false });
export const pause = (run) => ask("POST", "/v1/runs", { run, paused: true });
export const resume = (run) => ask("POST", "/v1/runs", { run, paused: false });
export const reclaim = () => ask("POST", "/v1/reclaim");
