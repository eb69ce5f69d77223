// The admin API with a key; every way it can fail has a name, and a message without a full stop.

const PATIENCE = 5000; // milliseconds for one answer, unless it is known to take longer

/** The key is not accepted (any longer). */
export class Unauthorized extends Error {}

/** The gateway answered, with an error of its own. */
export class Refused extends Error {
  constructor(status, code, message) {
    super(message);
    Object.assign(this, { status, code });
  }
}

/** Nothing that could be understood came back. */
export class Unreachable extends Error {}

export class Api {
  constructor(key) {
    this.key = key;
  }

  get(path, patience = PATIENCE) {
    return this.#ask("GET", path, patience);
  }

  /** The answer as it is, not as JSON. */
  text(path, patience = PATIENCE) {
    return this.#ask("GET", path, patience, null, (answer) => answer.text());
  }

  /** `content` is sent as JSON. */
  post(path, content = null, patience = PATIENCE) {
    return this.#ask("POST", path, patience, content === null ? null : JSON.stringify(content));
  }

  async #ask(method, path, patience, body = null, read = (answer) => answer.json()) {
    const address = new URL(`admin/v1/${path}`, document.baseURI);
    const headers = { authorization: `Bearer ${this.key}` };
    try {
      const answer = await fetch(address, {
        method,
        headers,
        body,
        cache: "no-store",
        signal: AbortSignal.timeout(patience),
      });
      if (answer.ok) return await read(answer);
      throw await refusal(answer);
    } catch (error) {
      if (error instanceof Unauthorized || error instanceof Refused) throw error;
      throw new Unreachable(error.name === "TimeoutError" ? `no answer within ${patience / 1000} s` : "no answer");
    }
  }
}

async function refusal(answer) {
  const body = await answer.json().catch(() => null);
  const message = body?.error?.message?.replace(/\.$/, "") ?? `the gateway answered ${answer.status}`;
  return answer.status === 401
    ? new Unauthorized(message)
    : new Refused(answer.status, body?.error?.code ?? null, message);
}

/** What a promise fails with; null: it does not. */
export function failure(promise) {
  return promise.then(
    () => null,
    (reason) => reason,
  );
}

/** Any text as one segment of a path. */
export function segment(text) {
  return encodeURIComponent(String(text).toWellFormed());
}
