// A browser without a window, spoken to over two pipes in the DevTools protocol.
import { spawn } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";

/// Starts a browser; `page()` opens an empty page.
export const launch = async (binary) => {
  const folder = dirname(binary);
  const profile = mkdtempSync(join(tmpdir(), "xlogmem-browser-"));
  const flags = [
    "--headless=shell", "--no-sandbox", "--no-zygote", "--remote-debugging-pipe", `--user-data-dir=${profile}`,
    "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-gpu", "--disable-accelerated-2d-canvas", "--disable-dev-shm-usage", "--hide-scrollbars",
  ];
  const env = { ...process.env, LD_LIBRARY_PATH: join(folder, "lib"), FONTCONFIG_FILE: join(folder, "fonts.conf"), HOME: profile };
  const child = spawn(binary, flags, { env, detached: true, stdio: ["ignore", "ignore", "pipe", "pipe", "pipe"] });
  // Also when the check fails half way.
  const end = () => { try { process.kill(-child.pid, "SIGKILL"); } catch { /* It has ended. */ } };
  process.on("exit", end);
  let errors = "";
  child.stderr.on("data", (bytes) => { errors = (errors + bytes).slice(-4000); });
  const waiting = new Map();
  const listeners = new Set();
  let [next, rest, gone] = [1, Buffer.alloc(0), null];
  child.on("exit", (code, signal) => {
    gone = new Error(`the browser ended (${code ?? signal}): ${errors}`);
    for (const { reject } of waiting.values()) reject(gone);
  });
  child.stdio[4].on("data", (bytes) => {
    rest = Buffer.concat([rest, bytes]);
    for (let end = rest.indexOf(0); end >= 0; end = rest.indexOf(0)) {
      const message = JSON.parse(rest.subarray(0, end).toString());
      rest = rest.subarray(end + 1);
      const answer = waiting.get(message.id);
      waiting.delete(message.id);
      if (!answer) listeners.forEach((listener) => listener(message));
      else if (message.error) answer.reject(new Error(`${answer.method}: ${message.error.message}`));
      else answer.resolve(message.result);
    }
  });
  const send = (method, params = {}, sessionId = undefined) => new Promise((resolve, reject) => {
    if (gone) return reject(gone);
    const id = next++;
    waiting.set(id, { resolve, reject, method });
    child.stdio[3].write(`${JSON.stringify({ id, method, params, sessionId })}\0`);
  });
  const page = async () => {
    const { targetId } = await send("Target.createTarget", { url: "about:blank" });
    const { sessionId } = await send("Target.attachToTarget", { targetId, flatten: true });
    const call = (method, params) => send(method, params, sessionId);
    const on = (listener) => listeners.add((message) => { if (message.sessionId === sessionId) listener(message); });
    const evaluate = async (expression) => {
      const { result, exceptionDetails } = await call("Runtime.evaluate", { expression, returnByValue: true, awaitPromise: true });
      if (exceptionDetails) throw new Error(`${expression}: ${exceptionDetails.exception?.description ?? exceptionDetails.text}`);
      return result.value;
    };
    const close = () => send("Target.closeTarget", { targetId });
    return { call, on, evaluate, close };
  };
  const close = async () => {
    // Nothing of the profile is kept, so there is nothing to wait for: the whole group of processes ends at once.
    const ended = new Promise((done) => child.on("exit", done));
    if (child.exitCode === null && child.signalCode === null) {
      end();
      await ended;
    }
    rmSync(profile, { recursive: true, force: true, maxRetries: 5 });
  };
  return { page, close, version: await send("Browser.getVersion") };
};
