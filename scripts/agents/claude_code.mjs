// Claude Code, by its command line, in a folder of its own.
import assert from "node:assert";
import { spawnSync } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { model, run } from "./checks.mjs";

const claude = join(dirname(fileURLToPath(import.meta.url)), "node_modules", ".bin", "claude");

function answerTo(prompt, ...flags) {
  const home = mkdtempSync(join(tmpdir(), "claude-"));
  const { ANTHROPIC_API_KEY, ...others } = process.env;
  const env = {
    ...others, HOME: home, ANTHROPIC_AUTH_TOKEN: ANTHROPIC_API_KEY, ANTHROPIC_MODEL: model,
    CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1", CLAUDE_CODE_MAX_OUTPUT_TOKENS: "300",
  };
  try {
    const command = ["-p", "--system-prompt", "Be brief.", "--tools", "", ...flags, "--", prompt];
    const done = spawnSync(claude, command, { cwd: home, env, encoding: "utf8", timeout: 240_000 });
    assert.equal(done.status, 0, done.stdout + done.stderr + done.error);
    return done.stdout;
  } finally {
    rmSync(home, { recursive: true, force: true });
  }
}

await run({
  "an answer": async () => {
    assert.ok(answerTo("Count from 3 to 6.").trim()); // behind much that it adds, which the embedded model does not follow
  },
  "an answer as it streams": async () => {
    const lines = answerTo("Hello!", "--output-format", "stream-json", "--verbose", "--include-partial-messages");
    const events = lines.split("\n").filter(Boolean).map((line) => JSON.parse(line));
    const deltas = events.filter((one) => one.type === "stream_event" && one.event.type === "content_block_delta");
    const text = deltas.map((one) => one.event.delta.text).join("");
    assert.ok(text && text === events.find((one) => one.type === "result").result);
  },
  "an answer and its usage, as JSON": async () => {
    const { result, usage, is_error } = JSON.parse(answerTo("Count from 3 to 6.", "--output-format", "json"));
    assert.ok(!is_error && result && usage.input_tokens + usage.cache_read_input_tokens > 5 && usage.output_tokens > 3);
  },
});
