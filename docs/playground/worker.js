/* worker.js - trains the four arms in turn, in a thread of its own, so that the page always answers. A worker makes one
   run. It receives {module, plan, settings} once, then {settings} and {running: true or false} at any time. */
"use strict";

const ARMS = [0, 1, 2, 3], STEPS_SHOWN = 12; // the maps show the points of that many steps
const next = new MessageChannel(); // a turn ends with a message to itself, so that messages of the page come between
let code, plan, running = false, waiting = false, step = 0, milliseconds = 0;

onmessage = ({data}) => {
    if (data.module) {
        code = new WebAssembly.Instance(data.module).exports;
        plan = data.plan;
        if (code.reset() !== 0) throw new Error("the initial weights are refused");
        const points = Array.from({length: STEPS_SHOWN}, (_, s) =>
            [...new Float32Array(code.memory.buffer, code.points(s), 2 * plan.batch)]).flat();
        postMessage({isa: string(code.isa()), points, maps: ARMS.map(map)});
    }
    if (data.settings) code.set(data.settings.lr, data.settings.weight_decay, data.settings.beta2);
    if ("running" in data) {
        running = data.running;
        if (!running) postMessage({paused: true});
    }
    continueSoon();
};

function continueSoon() {
    if (!running || waiting) return;
    waiting = true;
    next.port2.postMessage(null);
}

next.port1.onmessage = () => {
    waiting = false;
    if (!running) return;
    const start = performance.now();
    const losses = ARMS.map(arm => code.train(arm, plan.point));
    milliseconds += performance.now() - start;
    step += plan.point;
    if (losses.some(loss => loss < 0)) throw new Error("a step is refused");
    running = step < plan.steps;
    const maps = running && step % (plan.point * plan.mean) !== 0 ? null : ARMS.map(map);
    postMessage({step, losses, maps, speed: 1000 * step / milliseconds, hashes: running ? null : ARMS.map(hash)});
    continueSoon();
};

const hash = arm => BigInt.asUintN(64, code.hash(arm)).toString(16).padStart(16, "0");
const map = arm => new Uint8Array(code.memory.buffer, code.map(arm), plan.side ** 2).slice();

function string(at) { // the string of C at this address
    const bytes = new Uint8Array(code.memory.buffer);
    return new TextDecoder().decode(bytes.subarray(at, bytes.indexOf(0, at)));
}
