// Codex, by its command line, in a folder of its own, and with as few instructions as the embedded model has room for.
import assert from "node:assert";
import { spawnSync } from "node:child_process";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { model, run } from "./checks.mjs";

const codex = join(dirname(fileURLToPath(import.meta.url)), "node_modules", ".bin", "codex");
const home = mkdtempSync(join(tmpdir(), "codex-"));
writeFileSync(join(home, "instructions.md"), "Be brief.");
writeFileSync(join(home, "config.toml"), `
model = "${model}"
model_provider = "sluice"
model_instructions_file = "${home}/instructions.md"
model_context_window = 2048
web_search = "disabled"
include_permissions_instructions = false
include_apps_instructions = false
include_environment_context = false

[model_providers.sluice]
name = "Sluice"
base_url = "${process.env.OPENAI_BASE_URL}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
`);

function events(...words) {
  const env = { ...process.env, CODEX_HOME: home };
  const done = spawnSync(codex, ["exec", "--skip-git-repo-check", "--json", ...words], {
    cwd: home, env, input: "", encoding: "utf8", timeout: 240_000,
  });
  assert.equal(done.status, 0, done.stdout + done.stderr + done.error);
  return done.stdout.split("\n").filter(Boolean).map((line) => JSON.parse(line));
}

const textOf = (told) => told.find((one) => one.item?.type === "agent_message").item.text;
const usageOf = (told) => told.find((one) => one.type === "turn.completed").usage;

await run({
  "an answer, and its usage": async () => {
    const told = events("Count from 3 to 6.");
    assert.ok(textOf(told)); // it sends no temperature, and the embedded model varies
    assert.ok(usageOf(told).input_tokens > 100 && usageOf(told).output_tokens > 3);
  },
  "a second turn behind the first, whose beginning is cached": async () => {
    const told = events("resume", "--last", "Count from 4 to 7.");
    assert.ok(textOf(told));
    assert.ok(usageOf(told).cached_input_tokens > 100);
  },
});
rmSync(home, { recursive: true, force: true });
