/* playground.js - the page: settings, buttons, curves and maps. The training itself is in worker.js. */

const ARMS = ["fp32", "nearest", "stochastic", "kahan"]; // in the order of playground.c
const [LOW, HIGH, TICKS] = [0.03, 1, [0.03, 0.1, 0.3, 1]]; // losses on the chart
const LEFT = 44, RIGHT = 92, TOP = 10, BOTTOM = 40; // the margins of the chart, in pixels
const NAMES = {fp32: "fp32", nearest: "nearest", stochastic: "stochastic", kahan: "Kahan"}; // at the curves' ends
const SPIRALS = [[247, 220, 111], [91, 60, 136]]; // their colours in the maps; one is light, the other dark
const DOTS = ["#a05a00", "#1d0b3c"];              // and those of their points, with a white ring on either

/* A module with one SIMD instruction (i8x16.splat), which a browser without simd128 refuses. */
const SIMD_MODULE = Uint8Array.of(0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 8, 1, 6, 0, 65,
    0, 253, 15, 11);

/* The default settings, as in playground.c, for a server without native.json: then there is nothing to compare with. */
const PLAN = {steps: 8000, point: 40, mean: 10, lr: 0.001, weight_decay: 0.01, beta2: 0.999, parameters: 354, batch: 16,
    side: 48, arms: null};

/* The settings by the id of their slider: the value from a position, the position from a value, and the text. */
const SETTINGS = {
    lr: {at: x => Number((10 ** x).toPrecision(2)), position: Math.log10, text: value => value.toExponential(1)},
    weight_decay: {at: x => x, position: value => value, text: value => value.toFixed(2)},
    beta2: {at: x => Number((1 - 10 ** -x).toFixed(5)), position: value => -Math.log10(1 - value),
        text: value => value.toFixed(5)},
};

const $ = id => document.getElementById(id);
const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");
const modules = {}; // "scalar" and "simd128": the compiled WebAssembly
let native;         // native.json: the default settings, and what the native program computes with them; or PLAN
let worker, running, step, byDefault; // of this run. byDefault: did all its steps have the default settings?
let losses; // per arm: the points of its curve
let maps, points; // per arm: what it says of each point of a grid; and points of the task: x, y, x, y ...

/* ---- Settings ---------------------------------------------------------------------------------------------------- */

const value = name => SETTINGS[name].at($(name).valueAsNumber);
const settings = () => Object.fromEntries(Object.keys(SETTINGS).map(name => [name, value(name)]));
const areDefault = () => Object.keys(SETTINGS).every(name => value(name) === native[name]);
const code = () => $("simd128").checked ? "simd128" : "scalar";

function show(name) {
    $(`${name}-text`).value = SETTINGS[name].text(value(name));
    $(name).setAttribute("aria-valuetext", $(`${name}-text`).value);
}

/* Moves a slider to a value. One that is out of range becomes the nearest end; one that is no number, the default. */
function place(name, wanted) {
    const slider = $(name), {at, position} = SETTINGS[name];
    if (Number.isNaN(wanted)) wanted = native[name];
    wanted = Math.min(Math.max(wanted, at(Number(slider.min))), at(Number(slider.max)));
    slider.value = position(wanted);
    show(name);
}

/* ---- Curves and maps --------------------------------------------------------------------------------------------- */

/* The mean of the last native.mean points, up to point i. */
function smooth(points, i) {
    const last = points.slice(Math.max(0, i + 1 - native.mean), i + 1);
    return last.reduce((sum, loss) => sum + loss, 0) / last.length;
}

function drawing() { // the positions of steps and losses on the chart, as wide and high as it is now
    const width = $("chart").clientWidth, height = $("chart").clientHeight;
    const x = at => LEFT + (width - LEFT - RIGHT) * at / native.steps;
    const y = loss => TOP + (height - TOP - BOTTOM) *
        Math.log(HIGH / Math.min(HIGH, Math.max(LOW, loss))) / Math.log(HIGH / LOW);
    return {width, height, x: at => x(at).toFixed(1), y: loss => y(loss).toFixed(1)};
}

function drawAxes() {
    const {width, height, x, y} = drawing();
    const add = (kind, attributes, text = "") => {
        const element = document.createElementNS("http://www.w3.org/2000/svg", kind);
        for (const name in attributes) element.setAttribute(name, attributes[name]);
        element.textContent = text;
        $("axes").append(element);
    };
    $("chart").setAttribute("viewBox", `0 0 ${width} ${height}`);
    $("axes").replaceChildren();
    for (const loss of TICKS) {
        add("path", {d: `M${x(0)} ${y(loss)}H${x(native.steps)}`});
        add("text", {x: LEFT - 6, y: Number(y(loss)) + 4, "text-anchor": "end"}, loss);
    }
    for (const at of [0, native.steps / 2, native.steps])
        add("text", {x: x(at), y: height - BOTTOM + 20, "text-anchor": at ? "end" : "start"}, at.toLocaleString("en"));
    drawCurves();
}

function drawCurves() {
    const {x, y} = drawing();
    ARMS.forEach((arm, a) => {
        const places = losses[a].map((_, i) => [(i + 1) * native.point, smooth(losses[a], i)]);
        const path = places.filter(([, loss]) => loss > 0).map(([at, loss]) => `${x(at)} ${y(loss)}`);
        $(`${arm}-curve`).setAttribute("d", path.length ? `M${path.join("L")}` : "");
        const last = places.at(-1);
        $(`${arm}-loss`).textContent = last ? last[1].toFixed(4) : "–";
        if (maps) drawMap($(`${arm}-map`), maps[a]);
    });
    drawNames();
}

/* The name of each curve at its end, with a line to it: above one another where the ends are close. */
function drawNames() {
    const {x, y} = drawing();
    const ends = ARMS.map((arm, a) => {
        const count = losses[a].length;
        return {arm, at: count * native.point, loss: smooth(losses[a], count - 1)};
    }).filter(({loss}) => loss > 0).sort((a, b) => a.loss - b.loss);
    let top = Infinity;
    for (const arm of ARMS) $(`${arm}-name`).textContent = "", $(`${arm}-lead`).setAttribute("d", "");
    for (const {arm, at, loss} of ends) {
        const left = Number(x(at)), end = Number(y(loss));
        top = Math.min(end, top - 18);
        $(`${arm}-lead`).setAttribute("d", `M${left + 3} ${end}L${left + 14} ${top}`);
        $(`${arm}-name`).setAttribute("x", left + 18);
        $(`${arm}-name`).setAttribute("y", top + 4);
        $(`${arm}-name`).textContent = NAMES[arm];
    }
}

function drawMap(canvas, map) {
    const small = new ImageData(native.side, native.side), size = Math.round(canvas.clientWidth * devicePixelRatio);
    if (canvas.shown === map && canvas.width === size) return;
    canvas.shown = map;
    map.forEach((odd, i) => {
        const colour = SPIRALS[0].map((even, c) => even + (SPIRALS[1][c] - even) * odd / 255);
        small.data.set([...colour, 255], 4 * i);
    });
    const pen = canvas.getContext("2d"), copy = new OffscreenCanvas(native.side, native.side);
    copy.getContext("2d").putImageData(small, 0, 0);
    canvas.width = canvas.height = size;
    pen.drawImage(copy, 0, 0, size, size);
    for (let i = 0; i < points.length; i += 2) {
        pen.beginPath();
        pen.arc((points[i] / 2.2 + 0.5) * size, (0.5 - points[i + 1] / 2.2) * size, size / 50, 0, 7);
        pen.fillStyle = DOTS[i / 2 % 2];
        pen.strokeStyle = "#fff";
        pen.lineWidth = size / 160;
        pen.fill();
        pen.stroke();
    }
}

let frame = 0;
function drawSoon() { // at most once per frame; with reduced motion, ten times per run
    if (reducedMotion.matches && running && step % (native.steps / 10) !== 0) return;
    frame ||= requestAnimationFrame(() => {
        frame = 0;
        drawCurves();
    });
}

/* ---- A run ------------------------------------------------------------------------------------------------------- */

function say(state, text) {
    document.body.dataset.state = state;
    $("status").textContent = text;
    $("start").textContent = {running: "Pause", paused: "Continue", done: "Start again"}[state] ?? "Start";
}

/* A new worker, which waits at step 0: the old one ends at once, whatever it does. */
function restart() {
    worker?.terminate();
    worker = new Worker("worker.js");
    worker.onmessage = event => event.target === worker && receive(event.data);
    worker.onerror = event => event.target === worker && fail(event.message);
    worker.postMessage({module: modules[code()], plan: native, settings: settings()});
    running = false;
    step = 0;
    byDefault = areDefault();
    losses = ARMS.map(() => []);
    for (const arm of ARMS) {
        $(arm).querySelector("b").textContent = "";
        $(arm).querySelector(".here").textContent = "–";
    }
    drawCurves();
    say("ready", "Ready");
}

function run(on) {
    running = on;
    worker.postMessage({running});
    if (on) say("running", "Training");
}

function receive(data) {
    if (data.isa) {
        $("isa").textContent = data.isa;
        points = data.points;
    }
    if (data.maps) maps = data.maps;
    if (data.isa) drawCurves();
    if (data.paused && !running && document.body.dataset.state === "running") {
        drawCurves();
        say("paused", `Paused at step ${step.toLocaleString("en")}`);
    }
    if (!data.losses) return;
    step = data.step;
    data.losses.forEach((loss, a) => losses[a].push(loss));
    $(`${code()}-speed`).textContent = `${Math.round(data.speed).toLocaleString("en")} steps/s`;
    if (data.hashes) finish(data.hashes);
    else drawSoon();
}

function finish(hashes) {
    const equal = hashes.map((hash, a) => hash === native.arms?.[a].hash);
    running = false;
    drawCurves();
    ARMS.forEach((arm, a) => {
        $(arm).querySelector("b").textContent = !native.arms ? "" : !byDefault ? "other settings" :
            equal[a] ? "equal" : "different";
        $(arm).querySelector(".here").textContent = hashes[a];
    });
    say("done", !native.arms ? "Done. This server has no hashes of the native program to compare with." :
        !byDefault ? "Done. The native hashes are those of the default settings." :
        equal.every(Boolean) ? "Done. The bits of all four runs are equal to the native ones." :
            "Done. The bits are different from the native ones.");
}

function fail(message) {
    worker?.terminate();
    running = false;
    say("failed", `Failed: ${message}`);
}

/* ---- Begin ------------------------------------------------------------------------------------------------------- */

async function load(url) {
    const response = await fetch(url);
    if (!response.ok) throw new Error(`${url}: ${response.status}`);
    return response;
}

async function begin() {
    const simd = WebAssembly.validate(SIMD_MODULE);
    for (const name of simd ? ["scalar", "simd128"] : ["scalar"])
        modules[name] = await WebAssembly.compile(await (await load(`${name}.wasm`)).arrayBuffer());
    native = await load("native.json").then(response => response.json()).catch(() => PLAN);

    for (const name of ["steps", "parameters"]) $(name).textContent = native[name].toLocaleString("en");
    $("mean").textContent = (native.mean * native.point).toLocaleString("en");
    ARMS.forEach((arm, a) => { $(arm).querySelector(".native").textContent = native.arms?.[a].hash ?? "–"; });

    // ?lr=1e-2&weight_decay=0.1&beta2=0.99&code=scalar sets other values than the default ones; ?wait waits for Start
    const query = new URLSearchParams(location.search);
    for (const name in SETTINGS) place(name, Number.parseFloat(query.get(name)));
    $("simd128").disabled = !simd;
    $(simd && query.get("code") !== "scalar" ? "simd128" : "scalar").checked = true;
    if (!simd) $("simd128-speed").textContent = "this browser does not have it";

    restart();
    if (!query.has("wait") && !reducedMotion.matches) run(true);
    new ResizeObserver(drawAxes).observe($("chart"));

    for (const name in SETTINGS)
        $(name).addEventListener("input", () => {
            show(name);
            byDefault &&= areDefault();
            worker.postMessage({settings: settings()});
        });
    for (const name of ["scalar", "simd128"]) $(name).addEventListener("change", restart);
    $("start").addEventListener("click", () => {
        if (["done", "failed"].includes(document.body.dataset.state)) restart();
        run(!running);
    });
    $("reset").addEventListener("click", restart);
    $("defaults").addEventListener("click", () => {
        for (const name in SETTINGS) place(name, NaN);
        restart();
    });
    $("form").addEventListener("submit", event => event.preventDefault());
}

begin().catch(error => fail(error.message));
