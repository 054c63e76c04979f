// wasi.js PROGRAM.wasm ARGUMENT...: runs a test that is compiled for WASI, the system interface of WebAssembly, by
// `node --no-warnings`: node warns that its WASI is experimental.
const fs = require("fs"), {WASI} = require("wasi");
const wasi = new WASI({version: "preview1", args: process.argv.slice(2), preopens: {"/": "/", ".": "."},
                       returnOnExit: true});
const code = new WebAssembly.Module(fs.readFileSync(process.argv[2]));
process.exitCode = wasi.start(new WebAssembly.Instance(code, wasi.getImportObject()));
