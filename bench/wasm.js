// wasm.js SCALAR.wasm SIMD.wasm [ROUNDS]: times two builds of wasm.c beside each other, for bench/wasm.sh. The builds
// alternate; a ratio is the median of the ratios of the rounds. Times are processor time, so that other programs do not
// count. Both builds must give the same bits.
const fs = require("fs");
const load = path => {
    const bytes = fs.readFileSync(path);
    const program = new WebAssembly.Instance(new WebAssembly.Module(bytes)).exports;
    const text = start => {
        if (start === 0) return null;
        const memory = new Uint8Array(program.memory.buffer);
        let end = start;
        while (memory[end]) end++;
        return Buffer.from(memory.slice(start, end)).toString();
    };
    return {program, stack: 0, name: kind => text(program.name(kind)), path: text(program.path())};
};
const N = 8192, rounds = Number(process.argv[4] || 21);
const builds = [load(process.argv[2]), load(process.argv[3])];
const processor = () => { // microseconds of processor time
    const used = process.cpuUsage();
    return used.user + used.system;
};
const time = (build, kind, count) => {
    const begin = processor();
    if (!build.program.run(kind, count)) throw Error("refused: " + build.name(kind));
    return (processor() - begin) * 1000 / count / N;
};
const median = values => values.sort((a, b) => a - b)[values.length >> 1];
console.log(`| nanoseconds per value | ${builds[0].path} | ${builds[1].path} | ratio |`);
console.log("|---|---|---|---|");
for (let kind = 0; builds[0].name(kind) !== null; kind++) {
    const counts = builds.map(build => {
        if (!build.program.prepare(kind)) throw Error("refused: " + build.name(kind));
        for (let i = 0; i < 20; i++) time(build, kind, 20); // until the engine has compiled it for speed
        return Math.max(1, Math.ceil(4e6 / N / Math.max(time(build, kind, 20), 0.1))); // 4 ms
    });
    const samples = [[], []], ratios = [];
    for (let round = 0; round < rounds; round++) {
        const times = builds.map((build, i) => time(build, kind, counts[i]));
        times.forEach((t, i) => samples[i].push(t));
        ratios.push(times[0] / times[1]);
    }
    const hashes = builds.map(build => {
        const memory = new Uint8Array(build.program.memory.buffer), top = build.program.__stack_pointer.value;
        let untouched = 0;
        memory.fill(0xA5, 0, top); // the stack grows down to address 0
        build.program.prepare(kind);
        build.program.run(kind, 3);
        while (memory[untouched] === 0xA5) untouched++;
        build.stack = Math.max(build.stack, top - untouched);
        return build.program.hash();
    });
    if (hashes[0] !== hashes[1]) throw Error("other bits: " + builds[0].name(kind));
    const [scalar, simd] = samples.map(s => median(s).toPrecision(3));
    console.log(`| ${builds[0].name(kind)} | ${scalar} | ${simd} | ${median(ratios).toFixed(1)} |`);
}
console.log(`\n| bytes of stack, at most | ${builds[0].path} | ${builds[1].path} |\n|---|---|---|`);
console.log(`| the calls above, with two 8-bit moments | ${builds[0].stack} | ${builds[1].stack} |`);
