/* cuda.cu - what a step costs on a GPU, next to the device-to-device copy and to the usual fp32 step with one launch
   per tensor. Bits first: a step that differs from the CPU is not timed. Medians of CUDA events; eager calls and
   replays of a graph. Writes build/bench/cuda.csv (argument: another path); bench/cuda_peers.py adds PyTorch and optimi
   to it. -DLINKED: with an object that has the implementation. */
#ifndef KAHAN_OPT_VMATH
#define KAHAN_OPT_VMATH
#endif
#ifdef LINKED
#define KAHAN_OPT_IMPLEMENTATION
#include "../kahan_opt.h"
#else
#define KAHAN_OPT_CUDA_IMPLEMENTATION
#endif
#include "../kahan_opt_cuda.cuh"
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

static void check(cudaError_t error, const char *what) {
    if (error == cudaSuccess) return;
    std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
    std::exit(1);
}
#define CHECK(call) check(call, #call)

/* ---- Timing ------------------------------------------------------------------------------------------------------ */

static cudaStream_t stream;

static double median(std::vector<double> times) {
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

/* Microseconds of one call: between events, about 0.3 s long, 11 times at least. */
template <class Work> static double device_time(Work work) {
    cudaEvent_t begin, end;
    std::vector<double> times;
    double total = 0;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    for (int i = 0; i < 3; ++i) work();
    while (times.size() < 11 || (total < 3e5 && times.size() < 2000)) {
        float ms = 0;
        CHECK(cudaEventRecord(begin, stream));
        work();
        CHECK(cudaEventRecord(end, stream));
        CHECK(cudaEventSynchronize(end));
        CHECK(cudaEventElapsedTime(&ms, begin, end));
        times.push_back(ms * 1e3);
        total += ms * 1e3;
    }
    CHECK(cudaEventDestroy(begin));
    CHECK(cudaEventDestroy(end));
    return median(times);
}

/* Microseconds of the host for one call, the GPU being free. */
template <class Work> static double host_time(Work work) {
    std::vector<double> times;
    for (int i = 0; i < 51; ++i) {
        CHECK(cudaStreamSynchronize(stream));
        const auto begin = std::chrono::steady_clock::now();
        work();
        times.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
    }
    CHECK(cudaStreamSynchronize(stream));
    return median(times);
}

template <class Work> static double graph_time(Work work) {
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    work();
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&replay, graph, 0));
    const double time = device_time([&] { CHECK(cudaGraphLaunch(replay, stream)); });
    CHECK(cudaGraphExecDestroy(replay));
    CHECK(cudaGraphDestroy(graph));
    return time;
}

/* ---- What is compared -------------------------------------------------------------------------------------------- */

struct mode {
    const char *name;
    kopt_format weight, grad, moment;
    kopt_rounding rounding;
    int rule;        /* 0 SGD, 1 AdamW, 2 StableAdamW, 3 Adam-atan2, 4 smooth Lion */
    int copy, stats; /* copy: a bf16 copy of fp32 weights; stats: with norm, clipping and finite check */
    double bytes;    /* per element, read and written */
};
static const mode modes[] = {
    {"AdamW bf16 KAHAN", KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_KAHAN, 1, 0, 0, 18},
    {"AdamW bf16 EXACT", KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_EXACT, 1, 0, 0, 18},
    {"AdamW bf16 COMPACT", KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_COMPACT, 1, 0, 0, 16},
    {"AdamW bf16 STOCHASTIC", KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_STOCHASTIC, 1, 0, 0, 14},
    {"AdamW bf16 NEAREST", KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_NEAREST, 1, 0, 0, 14},
    {"AdamW fp16 KAHAN", KOPT_FP16, KOPT_FP16, KOPT_FP16, KOPT_KAHAN, 1, 0, 0, 18},
    {"AdamW bf16 KAHAN, fp32 moments", KOPT_BF16, KOPT_BF16, KOPT_F32, KOPT_KAHAN, 1, 0, 0, 26},
    {"SGD momentum bf16 KAHAN", KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_KAHAN, 0, 0, 0, 14},
    {"AdamW fp32", KOPT_F32, KOPT_F32, KOPT_F32, KOPT_NEAREST, 1, 0, 0, 28},
    {"AdamW fp32 master, bf16 copy", KOPT_F32, KOPT_BF16, KOPT_F32, KOPT_NEAREST, 1, 1, 0, 28},
    {"AdamW bf16 KAHAN, 8-bit moments", KOPT_BF16, KOPT_BF16, KOPT_Q8, KOPT_KAHAN, 1, 0, 0, 14.06},
    {"AdamW bf16 COMPACT, 8-bit m.", KOPT_BF16, KOPT_BF16, KOPT_Q8, KOPT_COMPACT, 1, 0, 0, 12.06},
    {"StableAdamW bf16 KAHAN", KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_KAHAN, 2, 0, 0, 22},
    {"Adam-atan2 bf16 KAHAN", KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_KAHAN, 3, 0, 0, 18},
    {"smooth Lion bf16 KAHAN", KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_KAHAN, 4, 0, 0, 14},
    {"AdamW bf16 KAHAN + norm, clip", KOPT_BF16, KOPT_BF16, KOPT_BF16, KOPT_KAHAN, 1, 0, 1, 20},
};

static kopt_optimizer optimizer_of(const mode &m) {
    kopt_optimizer o = m.rule == 4   ? kopt_smooth_lion(1e-3, 10)
                       : m.rule == 3 ? kopt_adam_atan2(1e-3)
                       : m.rule == 2 ? kopt_stable_adamw(1e-3)
                       : m.rule == 1 ? kopt_adamw(1e-3)
                                     : kopt_sgd(1e-3, 0.9);
    o.weight_format = m.weight;
    o.moment_format = m.moment;
    o.rounding = m.rounding;
    return o;
}

static size_t width(kopt_format f) { return f == KOPT_F32 ? 4 : 2; }

/* Numbers with random fractions and signs, near 2^-4: bits of a hash. */
static __host__ __device__ uint32_t pattern(uint64_t i) {
    uint64_t x = (i + 1) * 0x9E3779B97F4A7C15ull;
    x = (x ^ x >> 31) * 0xBF58476D1CE4E5B9ull;
    return static_cast<uint32_t>(x >> 32);
}
static __host__ __device__ uint32_t number(kopt_format f, uint64_t i) {
    const uint32_t h = pattern(i);
    return f == KOPT_F32    ? (h & 0x807FFFFFu) | 0x3D800000u
           : f == KOPT_BF16 ? (h >> 16 & 0x807Fu) | 0x3D80u
                            : (h >> 16 & 0x83FFu) | 0x2C00u;
}
static __global__ void fill(void *p, kopt_format f, size_t n, uint64_t salt) {
    for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < n;
         i += gridDim.x * static_cast<size_t>(blockDim.x))
        if (f == KOPT_F32)
            static_cast<uint32_t *>(p)[i] = number(f, i + salt);
        else
            static_cast<uint16_t *>(p)[i] = static_cast<uint16_t>(number(f, i + salt));
}

/* The tensors of a run in one piece of memory, each array aligned to 256 bytes, or `shift` bytes beyond. */
struct list {
    kopt_optimizer opt;
    std::vector<kopt_tensor> tensors;
    kopt_cuda_plan plan;
    char *memory = nullptr, *device = nullptr;
    double elements = 0;

    static size_t room(size_t bytes) { return (bytes + 511) & ~static_cast<size_t>(255); }

    bool make(const mode &m, const std::vector<size_t> &sizes, size_t shift) {
        size_t total = 0, free_bytes = 0, all = 0;
        opt = optimizer_of(m);
        for (size_t n : sizes)
            total += room(n * width(m.weight)) + room(n * width(m.grad)) + room(kopt_state_size(&opt, n)) +
                     (m.copy ? room(n * 2) : 0);
        CHECK(cudaMemGetInfo(&free_bytes, &all));
        if (total + (static_cast<size_t>(1) << 30) > free_bytes) return false;
        CHECK(cudaMalloc(&memory, total));
        CHECK(cudaMemset(memory, 0, total));
        char *p = memory;
        for (size_t n : sizes) {
            kopt_tensor t = kopt_tensor_of(p + shift, nullptr, m.grad, n, nullptr, kopt_state_size(&opt, n));
            fill<<<1024, 256>>>(t.weight, m.weight, n, 1);
            p += room(n * width(m.weight));
            t.grad = p + shift;
            fill<<<1024, 256>>>(t.grad, m.grad, n, 7777);
            p += room(n * width(m.grad));
            t.state = p + shift;
            p += room(t.state_size);
            if (m.copy) t.copy = p + shift, t.copy_format = KOPT_BF16, p += room(n * 2);
            t.id = static_cast<uint32_t>(tensors.size());
            tensors.push_back(t);
            elements += static_cast<double>(n);
        }
        const kopt_cuda_group g = {&opt, tensors.data(), tensors.size()};
        const size_t size = kopt_cuda_plan_size(&g, 1);
        std::vector<uint64_t> bytes(size / 8 + 2);
        void *host =
            reinterpret_cast<void *>((reinterpret_cast<uintptr_t>(bytes.data()) + 15) & ~static_cast<uintptr_t>(15));
        CHECK(cudaMalloc(&device, size));
        if (kopt_cuda_plan_build(&plan, host, size, &g, 1) != KOPT_OK) std::exit(1);
        if (kopt_cuda_plan_upload(&plan, device, host, stream) != KOPT_OK) std::exit(1);
        CHECK(cudaStreamSynchronize(stream));
        if (m.stats) {
            const kopt_cuda_options options = {1, 1.0, nullptr, nullptr, nullptr};
            kopt_cuda_set_options(&plan, &options, stream);
        }
        CHECK(cudaDeviceSynchronize());
        return true;
    }

    void step(const mode &m) {
        if (m.stats && kopt_cuda_stats(&plan, stream) != KOPT_OK) std::exit(1);
        if (kopt_cuda_step(&plan, stream) != KOPT_OK) std::exit(1);
    }

    ~list() { cudaFree(memory), cudaFree(device); }
};

/* Two steps of 100,003 elements are those of the CPU, weights and state. */
static bool bits_equal(const mode &m) {
    const size_t n = 100003;
    list l;
    if (!l.make(m, {n}, 0)) return false;
    std::vector<uint32_t> weight(n), grad(n);
    std::vector<char> state(l.tensors[0].state_size + 1), seen(n * 4 + state.size());
    kopt_optimizer o = l.opt;
    kopt_tensor t = kopt_tensor_of(weight.data(), grad.data(), m.grad, n, state.data(), l.tensors[0].state_size);
    bool equal = true;
    for (size_t i = 0; i < n; ++i) {
        const uint32_t w = number(m.weight, i + 1), g = number(m.grad, i + 7777);
        std::memcpy(reinterpret_cast<char *>(weight.data()) + i * width(m.weight), &w, width(m.weight));
        std::memcpy(reinterpret_cast<char *>(grad.data()) + i * width(m.grad), &g, width(m.grad));
    }
    kopt_state_init(&o, &t, nullptr);
    if (m.stats) {
        kopt_norm norm = {};
        kopt_norm_add(&norm, grad.data(), m.grad, n);
        o.clip = kopt_clip_coefficient(&norm, 1.0, 1);
    }
    for (int k = 0; k < 2; ++k) {
        equal = equal && kopt_optimizer_step(&o, &t, 1) == KOPT_OK;
        l.step(m);
    }
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemcpy(seen.data(), l.tensors[0].weight, n * width(m.weight), cudaMemcpyDeviceToHost));
    equal = equal && std::memcmp(seen.data(), weight.data(), n * width(m.weight)) == 0;
    CHECK(cudaMemcpy(seen.data(), l.tensors[0].state, t.state_size, cudaMemcpyDeviceToHost));
    return equal &&
           std::memcmp(seen.data() + 64, state.data() + 64, t.state_size - 64) == 0; /* the header is the host's */
}

/* The usual: fp32 master weights and moments, bf16 weights and gradients, a thread per element, a launch per tensor. */
static __global__ void usual(uint16_t *p, const uint16_t *g, float *master, float *m, float *v, size_t n, float lr,
                             float b1, float b2, float c1, float c2, float eps, float wd) {
    const size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x;
    if (i >= n) return;
    const float grad = __uint_as_float(static_cast<uint32_t>(g[i]) << 16);
    const float mi = m[i] = b1 * m[i] + (1 - b1) * grad, vi = v[i] = b2 * v[i] + (1 - b2) * grad * grad;
    const float x = master[i] - lr * (mi / c1 / (sqrtf(vi / c2) + eps) + wd * master[i]);
    const uint32_t u = __float_as_uint(x);
    master[i] = x;
    p[i] = static_cast<uint16_t>((u + 0x7FFFu + (u >> 16 & 1)) >> 16);
}

static double usual_time(const std::vector<size_t> &sizes) {
    std::vector<char *> memory;
    size_t total = 0, free_bytes = 0, all = 0;
    for (size_t n : sizes) total += n * 16 + 256;
    CHECK(cudaMemGetInfo(&free_bytes, &all));
    if (total + (static_cast<size_t>(1) << 30) > free_bytes) return 0;
    for (size_t n : sizes) {
        char *p;
        const size_t padded = (n + 7) & ~static_cast<size_t>(7);
        CHECK(cudaMalloc(&p, padded * 16));
        CHECK(cudaMemset(p, 0, padded * 16));
        memory.push_back(p);
    }
    const double time = device_time([&] {
        for (size_t k = 0; k < sizes.size(); ++k) {
            const size_t n = sizes[k], padded = (n + 7) & ~static_cast<size_t>(7);
            char *p = memory[k];
            usual<<<static_cast<unsigned>((n + 511) / 512), 512, 0, stream>>>(
                reinterpret_cast<uint16_t *>(p), reinterpret_cast<uint16_t *>(p + 2 * padded),
                reinterpret_cast<float *>(p + 4 * padded), reinterpret_cast<float *>(p + 8 * padded),
                reinterpret_cast<float *>(p + 12 * padded), n, 1e-3f, 0.9f, 0.999f, 0.5f, 0.5f, 1e-8f, 0.01f);
        }
    });
    for (char *p : memory) cudaFree(p);
    return time;
}

/* ---- The table ------------------------------------------------------------------------------------------------ */

static FILE *csv;
static double copy_rate; /* bytes per microsecond */
static double cache;     /* bytes of L2: what is smaller stays there from one step to the next, and is said to */

static void row(const char *who, const char *what, double elements, double bytes, double eager, double graph,
                double host) {
    const double best = graph > 0 && graph < eager ? graph : eager, rate = elements * bytes / best;
    std::printf("%-32s %-22s %10.1f us %10.1f us %8.1f us %8.2f Gel/s %6.3f TB/s %5.1f %% of copy%s\n", who, what,
                eager, graph, host, elements / best / 1e3, rate / 1e6, 100 * rate / copy_rate,
                elements * bytes < 4 * cache ? " (L2)" : "");
    std::fprintf(csv, "%s,%s,%.0f,%.2f,%.2f,%.2f,%.2f,%.4f\n", who, what, elements, bytes, eager, graph, host,
                 rate / copy_rate);
    std::fflush(csv);
    std::fflush(stdout);
}

template <typename... Pointer> static void allocate(size_t bytes, Pointer... pointer) {
    for (void *p : {static_cast<void *>(pointer)...}) CHECK(cudaMalloc(static_cast<void **>(p), bytes));
}

static void copy_bandwidth() {
    const size_t bytes = static_cast<size_t>(1) << 31;
    char *a, *b;
    allocate(bytes, &a, &b);
    CHECK(cudaMemset(a, 1, bytes));
    const double time = device_time([&] { CHECK(cudaMemcpyAsync(b, a, bytes, cudaMemcpyDeviceToDevice, stream)); });
    copy_rate = 2.0 * bytes / time;
    CHECK(cudaFree(a));
    CHECK(cudaFree(b));
    row("device-to-device copy", "2 GiB", bytes / 2.0, 4, time, 0, 0);
}

/* The functions of arrays: fp32 in and out (atan2: two in), and one of 16 bits. */
static void functions() {
    const size_t n = 200000000;
    float *x, *y, *out;
    allocate(4 * n, &x, &y, &out);
    fill<<<1024, 256>>>(x, KOPT_F32, n, 1);
    fill<<<1024, 256>>>(y, KOPT_F32, n, 77);
    CHECK(cudaDeviceSynchronize());
    row("exp", "2e8", n, 8, device_time([&] { kopt_cuda_vmath_exp(out, x, n, stream); }), 0, 0);
    row("log", "2e8", n, 8, device_time([&] { kopt_cuda_vmath_log(out, x, n, stream); }), 0, 0);
    row("tanh", "2e8", n, 8, device_time([&] { kopt_cuda_vmath_tanh(out, x, n, stream); }), 0, 0);
    row("erf", "2e8", n, 8, device_time([&] { kopt_cuda_vmath_erf(out, x, n, stream); }), 0, 0);
    row("erfc", "2e8", n, 8, device_time([&] { kopt_cuda_vmath_erfc(out, x, n, stream); }), 0, 0);
    row("atan2", "2e8", n, 12, device_time([&] { kopt_cuda_vmath_atan2(out, y, x, n, stream); }), 0, 0);
    row("sincospi", "2e8", n, 12, device_time([&] { kopt_cuda_vmath_sincospi(out, y, x, n, stream); }), 0, 0);
    fill<<<1024, 256>>>(x, KOPT_BF16, n, 1);
    CHECK(cudaDeviceSynchronize());
    row("map GELU bf16", "2e8", n, 4, device_time([&] { kopt_cuda_map(KOPT_GELU, out, x, KOPT_BF16, n, stream); }), 0,
        0);
    row("map SiLU bf16", "2e8", n, 4, device_time([&] { kopt_cuda_map(KOPT_SILU, out, x, KOPT_BF16, n, stream); }), 0,
        0);
    for (float *p : {x, y, out}) CHECK(cudaFree(p));
}

/* A bf16 sum with KAHAN of bf16 gradients, and clipping by value. */
static void accumulation() {
    const size_t n = 200000000;
    char *grad, *sum, *residual;
    allocate(2 * n, &grad, &sum, &residual);
    fill<<<1024, 256>>>(grad, KOPT_BF16, n, 1);
    CHECK(cudaDeviceSynchronize());
    kopt_accumulator a = kopt_accumulator_of(sum, KOPT_BF16, residual, n);
    row("accumulate bf16 KAHAN", "2e8", n, 10,
        device_time([&] { kopt_cuda_accumulate(&a, grad, KOPT_BF16, 1, nullptr, stream); }), 0, 0);
    row("clip by value bf16", "2e8", n, 4, device_time([&] { kopt_cuda_clip_value(grad, KOPT_BF16, n, 0.05, stream); }),
        0, 0);
    for (char *p : {grad, sum, residual}) CHECK(cudaFree(p));
}

/* bf16 gradients, with error feedback in bf16, to 8 bits and to 1; and the fp32 sum of them. */
static void compression() {
    const size_t n = 100000000;
    char *grad, *residual, *out, *sum;
    allocate(2 * n, &grad, &residual, &out);
    allocate(4 * n, &sum);
    fill<<<1024, 256>>>(grad, KOPT_BF16, n, 1);
    CHECK(cudaMemset(sum, 0, 4 * n));
    CHECK(cudaDeviceSynchronize());
    for (const kopt_format code : {KOPT_Q8, KOPT_SIGN}) {
        const size_t size = kopt_compressed_size(code, n);
        const double each = static_cast<double>(size) / static_cast<double>(n);
        kopt_compressor c = kopt_compressor_of(code, residual, n);
        const double pack = device_time([&] { kopt_cuda_compress(&c, out, size, grad, KOPT_BF16, nullptr, stream); });
        const double add = device_time([&] { kopt_cuda_decompress_add(sum, KOPT_F32, out, size, code, n, 1, stream); });
        row(code == KOPT_Q8 ? "compress to 8 bits" : "compress to 1 bit", "1e8", n, 6 + each, pack, 0, 0);
        row(code == KOPT_Q8 ? "add 8 bits" : "add 1 bit", "1e8", n, 8 + each, add, 0, 0);
    }
    const double time =
        device_time([&] { kopt_cuda_reduce(sum, KOPT_BF16, grad, n / 4, 4, KOPT_BF16, n / 4, 0.25, stream); });
    row("reduce 4 shards bf16", "25e6", n / 4.0, 10, time, 0, 0);
    for (char *p : {grad, residual, out, sum}) CHECK(cudaFree(p));
}

static std::vector<size_t> gpt2() {
    std::vector<size_t> n = {50257 * 768, 1024 * 768};
    for (int layer = 0; layer < 12; ++layer)
        n.insert(n.end(), {768, 768, 768 * 2304, 2304, 768 * 768, 768, 768, 768, 768 * 3072, 3072, 3072 * 768, 768});
    n.insert(n.end(), {768, 768});
    return n;
}

int main(int argc, char **argv) {
    int devices = 0;
    const cudaError_t error = cudaGetDeviceCount(&devices);
    if (error != cudaSuccess || devices == 0) {
        std::printf("SKIPPED: the GPU bench (no usable CUDA device, code %d)\n", static_cast<int>(error));
        return 0;
    }
    const char *path = argc > 1 ? argv[1] : "build/bench/cuda.csv";
    csv = std::fopen(path, "w");
    if (!csv) return std::perror(path), 1;
    std::fprintf(csv, "who,what,elements,bytes,eager_us,graph_us,host_us,of_copy\n");
    cudaDeviceProp p;
    CHECK(cudaGetDeviceProperties(&p, 0));
    cache = p.l2CacheSize;
    std::printf("%s, sm_%d%d, %d processors, L2 %d MB\n", p.name, p.major, p.minor, p.multiProcessorCount,
                p.l2CacheSize >> 20);
    std::printf("%-32s %-22s %13s %13s %11s\n", "", "", "eager", "graph", "host");
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    copy_bandwidth();

    const struct {
        const char *name;
        std::vector<size_t> sizes;
        size_t shift;
        int all;
    } lists[] = {
        {"1e3", {1000}, 0, 0},
        {"1e4", {10000}, 0, 0},
        {"1e5", {100000}, 0, 0},
        {"1e6", {1000000}, 0, 0},
        {"1e7", {10000000}, 0, 0},
        {"64M", {64000000}, 0, 1},
        {"1e8", {100000000}, 0, 1},
        {"1e9", {1000000000}, 0, 1},
        {"2^31+16", {(static_cast<size_t>(1) << 31) + 16}, 0, 0},
        {"GPT-2 124M", gpt2(), 0, 1},
        {"10,000 x 64", std::vector<size_t>(10000, 64), 0, 1},
        {"1,000 x 1,024", std::vector<size_t>(1000, 1024), 0, 1},
        {"200 x 1M", std::vector<size_t>(200, 1048576), 0, 0},
        {"10 x 16.8M", std::vector<size_t>(10, 16777216), 0, 0},
        {"1e8, 2 bytes off", {100000000}, 2, 0},
        {"1e8 + 1 (arrays apart)", {100000001}, 0, 0},
    };
    int wrong = 0;
    double worst = 1e9, small = 0;
    for (const mode &m : modes) {
        if (!bits_equal(m)) {
            std::printf("%-32s WRONG BITS: not timed\n", m.name);
            ++wrong;
            continue;
        }
        for (const auto &l : lists) {
            if (!l.all && &m != modes) continue; /* every list for the first mode */
            list run;
            if (!run.make(m, l.sizes, l.shift)) {
                std::printf("%-32s %-22s does not fit into memory\n", m.name, l.name);
                continue;
            }
            const double eager = device_time([&] { run.step(m); }), host = host_time([&] { run.step(m); });
            const double graph = graph_time([&] { run.step(m); });
            row(m.name, l.name, run.elements, m.bytes, eager, graph, host);
            if (run.elements >= 64e6 && l.shift == 0 && l.sizes.size() == 1 && run.elements != 100000001 &&
                m.weight != KOPT_F32 && !m.stats)
                worst = std::min(worst, run.elements * m.bytes / std::min(eager, graph) / copy_rate);
            if (&m == modes && l.sizes.size() == 10000) small = graph;
        }
    }
    accumulation();
    compression();
    functions();
    for (const auto &l : lists)
        if (l.shift == 0 && l.sizes[0] % 2 == 0) {
            double elements = 0;
            for (size_t n : l.sizes) elements += static_cast<double>(n);
            const double time = usual_time(l.sizes);
            if (time > 0) row("fp32 master, launch per tensor", l.name, elements, 28, time, 0, 0);
        }
    std::printf("\nbits: %d modes wrong\n", wrong);
    if (worst < 1e9)
        std::printf("goal, 64M elements and more in every 16-bit mode: at least 92 %% of the copy: %.1f %%, %s\n",
                    100 * worst, worst >= 0.92 ? "met" : "MISSED");
    if (small > 0)
        std::printf("goal, 10,000 x 64 in at most 60 us: %.1f us, %s\n", small, small <= 60 ? "met" : "MISSED");
    std::fclose(csv);
    return wrong != 0;
}
