// Runs the checks of one client, and prints a line of JSON for each: what was tried, and what went wrong.
export const ask = "What is the weather in Paris?";
export const model = process.env.SLUICE_MODEL;

export async function run(checks) {
  for (const [check, tried] of Object.entries(checks)) {
    let problem = null;
    try {
      await tried();
    } catch (error) {
      problem = String(error.stack).slice(0, 1500);
    }
    console.log(JSON.stringify({ check, problem }));
  }
}
