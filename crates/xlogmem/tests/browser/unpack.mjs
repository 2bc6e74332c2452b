// Unpacks the browser that the registry package carries, with the libraries and the font it brings along.
// usage: node unpack.mjs NODE_MODULES FOLDER
import { createReadStream, createWriteStream, chmodSync, mkdirSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join, resolve } from "node:path";
import { pipeline } from "node:stream/promises";
import { createBrotliDecompress } from "node:zlib";

const [modules, folder] = process.argv.slice(2).map((path) => resolve(path));
const tar = createRequire(join(modules, "x"))("tar-fs");
const packed = (name) => createReadStream(join(modules, "@sparticuz/chromium/bin", name));

mkdirSync(folder, { recursive: true });
await pipeline(packed("chromium.br"), createBrotliDecompress(), createWriteStream(join(folder, "chromium")));
chmodSync(join(folder, "chromium"), 0o755);
await pipeline(packed("al2023.tar.br"), createBrotliDecompress(), tar.extract(folder));
await pipeline(packed("swiftshader.tar.br"), createBrotliDecompress(), tar.extract(folder));
await pipeline(packed("fonts.tar.br"), createBrotliDecompress(), tar.extract(folder));
writeFileSync(
  join(folder, "fonts.conf"),
  `<?xml version="1.0"?>\n<fontconfig><dir>${join(folder, "fonts")}</dir><cachedir>${join(folder, "font-cache")}</cachedir></fontconfig>\n`,
);
