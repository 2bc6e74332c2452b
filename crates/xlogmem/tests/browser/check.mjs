// Opens a report in a browser and checks it as its readers meet it.
// usage: node check.mjs BROWSER PAGE [SCREENSHOTS [NAME]]; prints one JSON object, exits 1 when something is wrong.
import { writeFileSync } from "node:fs";
import { join } from "node:path";
import { pathToFileURL } from "node:url";
import { launch } from "./devtools.mjs";

const [binary, file, folder, name = "report"] = process.argv.slice(2);
const wrong = [];
const figures = {};
const check = (good, what) => { if (!good) wrong.push(what); };
setTimeout(() => {
  console.log(JSON.stringify({ wrong: [...wrong, "the check took longer than ten minutes"], figures }));
  process.exit(1);
}, 600_000).unref();
const browser = await launch(binary);
figures.browser = browser.version.product;
const page = await browser.page();
const requests = [];
const blocked = [];
const complaints = [];
page.on(({ method, params }) => {
  if (method === "Network.requestWillBeSent") requests.push(params.request.url);
  if (method === "Network.loadingFailed") blocked.push(params.blockedReason ?? params.errorText);
  if (method === "Runtime.exceptionThrown") complaints.push(params.exceptionDetails.exception?.description ?? params.exceptionDetails.text);
  if (method === "Runtime.consoleAPICalled") complaints.push(`console.${params.type}`);
  // Looking at pixels is what this check does, not the page.
  const ownDoing = method === "Log.entryAdded" && params.entry.text.startsWith("Canvas2D: Multiple readback");
  if (method === "Log.entryAdded" && !ownDoing) complaints.push(params.entry.text);
});
for (const domain of ["Page", "Runtime", "Log", "Network"]) await page.call(`${domain}.enable`);
await page.call("Emulation.setDeviceMetricsOverride", { width: 1280, height: 960, deviceScaleFactor: 1, mobile: false });
const scheme = (value) => page.call("Emulation.setEmulatedMedia", { features: [{ name: "prefers-color-scheme", value }] });
const frame = () => page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))");
const text = (id) => page.evaluate(`document.getElementById(${JSON.stringify(id)}).textContent`);

// --- The first picture.
await scheme("light");
const url = pathToFileURL(file).href;
const began = Date.now();
await page.call("Page.navigate", { url });
const mark = async (name) => {
  while (Date.now() - began < 120_000) {
    const time = await page.evaluate(`performance.getEntriesByName("${name}")[0]?.startTime ?? null`).catch(() => null);
    if (time !== null) return time;
    await new Promise((done) => setTimeout(done, 10));
  }
  wrong.push(`the page never came to ${name}: ${complaints.join("; ")}`);
  return null;
};
figures.first_picture_ms = await mark("first-picture");
figures.complete_ms = await mark("complete");

// --- Colours: how light the paper of the chart is, and that something is drawn on it.
const looks = (id) => page.evaluate(`(() => {
  const canvas = document.getElementById("${id}");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const seen = new Set();
  let paper = 0;
  for (let at = 0; at < data.length; at += 4) seen.add((data[at] << 16) | (data[at + 1] << 8) | data[at + 2]);
  for (let at = 0; at < 40; at += 4) paper += (data[at] + data[at + 1] + data[at + 2]) / 30;
  return { colours: seen.size, paper };
})()`);
const screenshot = async (kind) => {
  if (!folder) return;
  for (const [part, id] of [["memory", null], ["addresses", "addresses"], ["streams", "streams"]]) {
    const top = id === null ? 0 : await page.evaluate(`document.getElementById("${id}").getBoundingClientRect().top + window.scrollY`);
    const bottom = await page.evaluate(`document.getElementById("${id ?? "memory"}").getBoundingClientRect().bottom + window.scrollY`);
    const clip = { x: 0, y: top, width: 1280, height: bottom - top + 8, scale: 0.65 };
    const { data } = await page.call("Page.captureScreenshot", { format: "png", clip, captureBeyondViewport: true });
    writeFileSync(join(folder, `${name}-${part}-${kind}.png`), Buffer.from(data, "base64"));
  }
};
for (const kind of ["light", "dark"]) {
  await scheme(kind);
  await frame();
  for (const id of ["memory-chart", "address-chart", "lane-chart"]) {
    const { colours, paper } = await looks(id);
    check(colours > 3, `${id} is empty in ${kind}`);
    check(kind === "light" ? paper > 200 : paper < 60, `${id} has paper of lightness ${paper} in ${kind}`);
  }
  await screenshot(kind);
}
await scheme("light");
await frame();

// --- Keys: to the chart by Tab alone, then select, zoom, pan, and back.
const press = async (key, shift = false) => {
  const params = { key, code: key, modifiers: shift ? 8 : 0, windowsVirtualKeyCode: { Tab: 9, Enter: 13 }[key] ?? 0 };
  if (key.length === 1 || key === "Enter") params.text = key === "Enter" ? "\r" : key;
  await page.call("Input.dispatchKeyEvent", { type: "keyDown", ...params });
  await page.call("Input.dispatchKeyEvent", { type: "keyUp", ...params });
};
const focused = () => page.evaluate("document.activeElement.id");
const reach = async (id) => {
  for (let presses = 0; presses < 80; presses++) {
    if ((await focused()) === id) return;
    await press("Tab");
  }
  wrong.push(`${id} is not reached by Tab`);
};
for (const id of ["zoom-in", "to-peak", "memory-chart"]) await reach(id);
const outline = await page.evaluate("getComputedStyle(document.activeElement).outlineStyle");
check(outline !== "none", "a focused chart has no ring");
const effect = async (key, id, shift = false) => {
  const before = await text(id);
  await press(key, shift);
  await frame();
  check((await text(id)) !== before, `${shift ? "Shift+" : ""}${key} does not change ${id}: ${before}`);
};
const wholeRange = await text("range");
const wholeLooks = await page.evaluate("document.getElementById('memory-chart').toDataURL()");
await effect("Home", "instant");
await effect("ArrowRight", "instant", true);
await effect("ArrowRight", "instant");
await effect("End", "instant");
await effect("p", "instant");
for (const key of ["+", "+", "[", "]", "-"]) await effect(key, "range");
check((await page.evaluate("document.getElementById('memory-chart').toDataURL()")) !== wholeLooks, "a zoomed chart looks as before");
await effect("0", "range");
check((await text("range")) === wholeRange, "0 does not go back to the whole log");
await page.evaluate("document.getElementById('zoom-in').focus()");
await effect("Enter", "range");
await page.evaluate("document.getElementById('reset').click()");

// --- One block: by key, by pointer, its life, and the zoom to it.
await page.evaluate("document.getElementById('address-chart').scrollIntoView({ behavior: 'instant', block: 'center' })");
await page.evaluate("document.getElementById('address-chart').focus()");
await press("p");
await effect("b", "block-about");
const about = await text("block-about");
figures.block = about;
check(/(bytes|KiB|MiB|GiB), .+; 0x[0-9a-f]+.*; allocated at .+(freed at|never freed)/.test(about), `a block is described as: ${about}`);
const lifeText = await text("block-life");
check(/allocated.*(freed|live at the end)/s.test(lifeText), `its life has no beginning or end: ${lifeText}`);
const mapLooks = () => page.evaluate("document.getElementById('address-chart').toDataURL()");
const beforeZoom = await mapLooks();
await press("Enter");
await frame();
check((await mapLooks()) !== beforeZoom, "Enter does not zoom to the life of the block");
const rect = await page.evaluate("(() => { const { left, top, width, height } = document.getElementById('address-chart').getBoundingClientRect(); return { left, top, width, height }; })()");
const [blockX, blockY] = (await page.evaluate("document.getElementById('address-chart').dataset.block")).split(" ").map(Number);
// The ring of a focused chart is outside of it; its border is one pixel wide.
const middle = { x: rect.left + 1 + blockX, y: rect.top + 1 + blockY };
const point = (type, more = {}) => page.call("Input.dispatchMouseEvent", { type, ...middle, ...more });
await point("mouseMoved");
await frame();
check(await page.evaluate("!document.getElementById('tip').hidden"), "no tip over a block");
const tipText = await page.evaluate("[...document.getElementById('tip').children].map((line) => line.textContent).join('; ')");
check(tipText === about, `the tip says ${tipText}, the chosen block is ${about}`);
if (folder) {
  const clip = { x: 0, y: rect.top - 70 + (await page.evaluate("window.scrollY")), width: 1280, height: rect.height + 520, scale: 0.65 };
  const { data } = await page.call("Page.captureScreenshot", { format: "png", clip, captureBeyondViewport: true });
  writeFileSync(join(folder, `${name}-block.png`), Buffer.from(data, "base64"));
}
await effect("B", "block-about");
await point("mousePressed", { button: "left", clickCount: 1 });
await point("mouseReleased", { button: "left", clickCount: 1 });
await frame();
check((await text("block-about")) === about, "a click does not choose the block under the pointer");

// --- Search: what matches is listed; a row chooses its block.
const type = async (id, value) => {
  await page.evaluate(`(() => { const box = document.getElementById("${id}"); box.value = ${JSON.stringify(value)}; box.dispatchEvent(new Event("input")); })()`);
  await frame();
};
const address = /0x[0-9a-f]+/.exec(about)[0];
await type("filter-tag", address);
check(/^[1-9][0-9,]* of [0-9,]+ blocks? match/.test(await text("filter-found")), `a search for ${address} finds: ${await text("filter-found")}`);
await type("filter-least", "1e30");
check((await text("filter-found")).startsWith("0 of "), "blocks are larger than 1e30 bytes");
await type("filter-least", "many");
check((await page.evaluate("document.getElementById('filter-least').getAttribute('aria-invalid')")) === "true", "a size that is none is accepted");
await type("filter-least", "");
await press("B");
await page.evaluate("document.querySelector('#filter-list tbody button').click()");
await frame();
check((await text("block-about")).includes(address), "a row of the search does not choose its block");
if (folder) {
  const top = await page.evaluate("document.getElementById('block').getBoundingClientRect().top + window.scrollY");
  const bottom = await page.evaluate("document.getElementById('block').getBoundingClientRect().bottom + window.scrollY");
  const { data } = await page.call("Page.captureScreenshot", { format: "png", clip: { x: 0, y: top, width: 1280, height: bottom - top + 8, scale: 0.65 }, captureBeyondViewport: true });
  writeFileSync(join(folder, `${name}-search.png`), Buffer.from(data, "base64"));
}

// --- Call sites, where the log has them: in the life of a block, as a search, and in a table whose rows search.
figures.stack = await text("block-stack");
const site = /called at ([^;]+)/.exec(about)?.[1];
if (site) {
  check(lifeText.includes(site), `the life of the block does not name ${site}`);
  const last = site.split("/").pop();
  await type("filter-tag", "");
  await type("filter-site", last.toUpperCase());
  check(/^[1-9][0-9,]* of [0-9,]+ blocks? match/.test(await text("filter-found")), `a search for ${last} finds: ${await text("filter-found")}`);
  await type("filter-site", "no such file");
  check((await text("filter-found")).startsWith("0 of "), "blocks come from no such file");
  await page.evaluate("document.getElementById('sites-more').open = true");
  await page.evaluate("document.querySelector('#all-sites tbody button').click()");
  await frame();
  const searched = await page.evaluate("document.getElementById('filter-site').value");
  check(/.:[0-9]+$/.test(searched) && !(await text("filter-found")).startsWith("0 of "), `a row of the call sites searches for ${searched}`);
  if (folder) {
    const place = (edge) => page.evaluate(`document.getElementById('sites-more').getBoundingClientRect().${edge} + window.scrollY`);
    const [top, bottom] = [await place("top"), await place("bottom")];
    const { data } = await page.call("Page.captureScreenshot", { format: "png", clip: { x: 0, y: top, width: 1280, height: bottom - top + 8, scale: 0.65 }, captureBeyondViewport: true });
    writeFileSync(join(folder, `${name}-sites.png`), Buffer.from(data, "base64"));
  }
  await type("filter-site", "");
  await type("filter-tag", address);
}

// --- Reserved memory, where the log has segments: a line that can be hidden, segments in the map with words and a table.
figures.reserved = await page.evaluate("JSON.parse(document.getElementById('data').textContent).reserved !== null");
if (figures.reserved) {
  check((await text("instant")).includes(" reserved"), `the instant does not name reserved memory: ${await text("instant")}`);
  await page.evaluate("document.getElementById('reset').click()");
  await frame();
  // Somewhere on the map there is free memory of a segment.
  const lines = await page.evaluate(`(() => {
    const canvas = document.getElementById("address-chart");
    const tip = document.getElementById("tip");
    const { left, top, width, height } = canvas.getBoundingClientRect();
    for (let x = 140; x < width - 10; x += 7) {
      for (let y = 10; y < height - 30; y += 3) {
        canvas.dispatchEvent(new PointerEvent("pointermove", { clientX: left + x, clientY: top + y }));
        const lines = [...tip.children].map((line) => line.textContent);
        if (!tip.hidden && lines[0].startsWith("reserved")) return lines.join("; ");
      }
    }
    return "nothing";
  })()`);
  await page.evaluate("document.getElementById('address-chart').dispatchEvent(new PointerEvent('pointerleave'))");
  check(/^reserved and free, in a segment of .+; 0x[0-9a-f]+.*; taken at .+(returned at|held at the end)/.test(lines), `free memory of a segment is described as: ${lines}`);
  const looksNow = () => page.evaluate("['memory-chart', 'address-chart'].map((id) => document.getElementById(id).toDataURL())");
  const shown = await looksNow();
  const box = "[...document.querySelectorAll('#legend input')].at(-1)";
  await page.evaluate(`${box}.click()`);
  await frame();
  const hidden = await looksNow();
  check(shown.every((look, at) => look !== hidden[at]), "hiding reserved memory changes nothing in a chart");
  await page.evaluate(`${box}.click()`);
  await frame();
  check((await looksNow()).every((look, at) => look === shown[at]), "reserved memory does not come back");
  await page.evaluate("document.getElementById('reserved-more').open = true");
  check(/^Segments: .+ at most/.test(await text("reserved-ranges")), `segments as a table: ${await text("reserved-ranges")}`);
  await page.evaluate("document.getElementById('reserved-more').open = false");
}

// --- The address keeps the view: the same address, opened anew, shows the same.
await page.evaluate("window.dispatchEvent(new Event('blur'))");
const kept = await page.evaluate("location.href");
check(kept.includes("block=") && kept.includes("tag=0x"), `the address does not keep the view: ${kept}`);
const seen = [await text("range"), await text("block-about"), await text("filter-found"), await mapLooks()];
await page.call("Page.navigate", { url: "about:blank" });
await page.call("Page.navigate", { url: kept });
await mark("complete");
await frame();
await page.evaluate("document.getElementById('address-chart').focus({ preventScroll: true })");
await frame();
const again = [await text("range"), await text("block-about"), await text("filter-found"), await mapLooks()];
check(seen.slice(0, 3).join() === again.slice(0, 3).join(), `opened anew the page shows ${again.slice(0, 3).join("; ")}, before ${seen.slice(0, 3).join("; ")}`);
check(seen[3] === again[3], "opened anew the address map looks different");
await page.evaluate("document.getElementById('filter-clear').click()");
await press("Escape");
await frame();
check((await text("range")) === wholeRange, "Escape does not go back to the whole log");

// --- How long a step takes, at every zoom.
await page.evaluate("document.getElementById('memory-chart').focus()");
const steps = 24;
const from = Date.now();
for (let at = 0; at < steps; at++) {
  await press(at < steps / 2 ? "+" : "-");
  await page.evaluate("new Promise((done) => requestAnimationFrame(done))");
}
figures.zoom_step_ms = (Date.now() - from) / steps;
await page.evaluate("document.getElementById('reset').click()");

// --- Names for those who do not see the page, and a table for every chart.
await page.evaluate("document.querySelectorAll('details').forEach((details) => { details.open = true; })");
await frame();
await page.call("Accessibility.enable");
const { nodes } = await page.call("Accessibility.getFullAXTree");
const needNames = new Set(["button", "link", "checkbox", "application", "table", "region", "DisclosureTriangle", "toolbar", "group", "heading"]);
figures.named = 0;
for (const node of nodes.filter((node) => !node.ignored && needNames.has(node.role?.value))) {
  const label = node.name?.value?.trim() ?? "";
  check(label !== "" || node.role.value === "group", `a ${node.role.value} has no name`);
  if (label !== "") figures.named += 1;
}
check(nodes.filter((node) => node.role?.value === "application").length === 3, "three charts are known to screen readers");
check(nodes.some((node) => node.role?.value === "status"), "there is no live region");
const bare = await page.evaluate(`[...document.querySelectorAll("canvas")]
  .filter((canvas) => !canvas.closest("section").querySelector("details table tbody tr")).map((canvas) => canvas.id)`);
check(bare.length === 0, `charts without a table: ${bare}`);
check((await page.evaluate("document.documentElement.lang")) === "en", "the page has no language");
check(await page.evaluate("document.body.scrollWidth <= window.innerWidth"), "the page is wider than the window");

// --- Nothing of the log is markup, nothing is asked for, nothing is complained about.
check((await page.evaluate("document.querySelectorAll('main img, main script, main iframe, main style').length")) === 0, "the log became markup");
check((await page.evaluate("typeof window.pwned")) === "undefined", "a text of the log was run");
check(complaints.length === 0, `the page complains: ${complaints.join("; ")}`);
figures.requests = requests.filter((request) => request.split("#")[0] !== url && request !== "about:blank");
check(figures.requests.length === 0, `the page asks for ${figures.requests}`);
figures.title = await page.evaluate("document.title");
figures.text = (await page.evaluate("document.querySelector('main').textContent")) + figures.stack;

// --- And if something asked, the page's policy would not let it.
blocked.length = 0;
await page.evaluate("new Promise((done) => { const image = new Image(); image.onerror = image.onload = done; image.src = 'http://127.0.0.1:9/x.png'; })");
const fetched = await page.evaluate("fetch('http://127.0.0.1:9/').then(() => 'went out', () => 'refused')");
check(fetched === "refused", "a request went out");
check(blocked.length > 0 && blocked.every((reason) => reason === "csp"), `requests are not stopped by the policy but by: ${blocked}`);

await browser.close();
console.log(JSON.stringify({ wrong, figures }));
process.exitCode = wrong.length > 0 ? 1 : 0;
