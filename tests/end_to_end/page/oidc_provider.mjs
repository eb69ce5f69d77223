// npm's oidc-provider with its own pages for tests: node oidc_provider.mjs PORT REDIRECT_URI,... CLIENT

import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [port, redirects, client] = process.argv.slice(2);
const found = createRequire(`${process.cwd()}/`).resolve("oidc-provider");
const { default: Provider } = await import(pathToFileURL(found));
const provider = new Provider(`http://127.0.0.1:${port}`, {
  clients: [{ client_id: client, token_endpoint_auth_method: "none", redirect_uris: redirects.split(",") }],
  claims: { openid: ["sub"], email: ["email", "email_verified"], profile: ["groups"] },
  cookies: { keys: ["of a test"] },
  pkce: { required: () => true },
  findAccount: (_, id) => ({
    accountId: id,
    claims: () => ({ sub: id, email: `${id}@example.com`, email_verified: true, groups: [id === "ada" ? "ops" : "none"] }),
  }),
});
provider.listen(Number(port), "127.0.0.1");
