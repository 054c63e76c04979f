/* Theorem 1 of "Revisiting BFloat16 Training" (Zamirai, Zhang, Aberger, De Sa 2020), and how to break through it.

     ./build.sh bench theorem1      half a minute; prints the tables, writes build/bench/theorem1.svg and .csv
     theorem1 test                  a few seconds; prints TAP

   Least squares, f_i(w) = (x_i . w - x_i . w*)^2 / 2, by SGD on one sample at a time: every gradient vanishes at w*, so
   SGD with a constant step converges to it. If a weight is rounded to nearest after each update, it does not:

       ||w_t - w*||  >=  min(||w_0 - w*||, epsilon (1 - 2 step L) / (step L + epsilon) * min_j |w*_j|)    for every t

   with L = max_i ||x_i||^2 (here 1) and epsilon = 2^-9 for bf16, 2^-12 for fp16: half an ulp of any weight is at least
   epsilon times the weight. Proof, with d = ||w_t - w*||: an update is at most step L d, and is cancelled if it is at
   most epsilon |w_j|, which is at least epsilon (|w*_j| - d). So if d is at most B = epsilon / (step L + epsilon) *
   min_j |w*_j|, no weight moves again. A step from farther away moves the weights by at most 2 step L d, as rounding at
   most doubles it, and ends at (1 - 2 step L) B or farther. With 1 - step L that is false: see test_tight().

   The smaller the step, the farther from w* updates are cancelled. The runs begin at 0, farther away than the second
   term, which is called the bound below. Here only the store of the weights is in 16 bit; gradients are fp32 and are
   taken at the 16-bit weights. */
#define KAHAN_OPT_IMPLEMENTATION
#include "../kahan_opt.h"
#include "../tests/unit/tap.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { D = 16, SAMPLES = 256, STEPS = 6, SEEDS = 5 };

static const double step_size[STEPS] = {0.3, 0.1, 0.03, 0.01, 0.003, 0.001};

typedef struct {
    const char *name;
    kopt_rounding rounding, compensation;
    const char *colour, *dash;
    double width;
} Arm;

enum { NEAREST, STOCHASTIC, KAHAN_NEAREST, KAHAN, COMPACT, EXACT, FP32, ARMS };

static const Arm arms[ARMS] = {
    {"nearest", KOPT_NEAREST, KOPT_STOCHASTIC, "#d1242f", "none", 2.5},
    {"stochastic", KOPT_STOCHASTIC, KOPT_STOCHASTIC, "#f08c00", "none", 2.5},
    {"Kahan, its compensation to nearest", KOPT_KAHAN, KOPT_NEAREST, "#8250df", "5 4", 2.0},
    {"Kahan", KOPT_KAHAN, KOPT_STOCHASTIC, "#0b3d91", "none", 2.0},
    {"compact", KOPT_COMPACT, KOPT_STOCHASTIC, "#57b894", "none", 5.0},
    {"exact", KOPT_EXACT, KOPT_STOCHASTIC, "#b9c0ca", "none", 9.0},
    {"fp32", KOPT_NEAREST, KOPT_STOCHASTIC, "#000000", "none", 0.0},
};

/* Distances of the 16-bit weights from w*, relative to ||w*||, in the mean over the seeds. */
typedef struct {
    double bound[STEPS];
    double rounded;              /* of w* itself, rounded to 16 bit: no 16-bit weights are closer */
    double error[ARMS][STEPS];   /* in the last tenth of the run */
    double closest[ARMS][STEPS]; /* at any time, divided by the bound: the smallest of all seeds */
} Results;

static void check(kopt_result result) {
    if (result == KOPT_OK) return;
    fprintf(stderr, "theorem1: %s\n", kopt_result_string(result));
    exit(2);
}

static uint32_t random_bits(uint64_t *state) { /* splitmix64 */
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (uint32_t)(z >> 32);
}

static double random_symmetric(uint64_t *state) { return (double)random_bits(state) / 2147483648.0 - 1.0; }

typedef struct {
    float x[SAMPLES][D], target[D]; /* rows of length 1; w* */
    double length, smallest;        /* ||w*||, min_j |w*_j| */
} Problem;

static void problem_make(Problem *p, uint64_t seed) {
    uint64_t random = seed * 1000003u;
    double square = 0;
    p->smallest = HUGE_VAL;
    for (int j = 0; j < D; j++) { /* between 1/2 and 2, of either sign */
        const double magnitude = exp2(random_symmetric(&random));
        p->target[j] = (float)(random_bits(&random) & 1 ? magnitude : -magnitude);
        square += magnitude * magnitude;
        if (magnitude < p->smallest) p->smallest = magnitude;
    }
    p->length = sqrt(square);
    for (int i = 0; i < SAMPLES; i++) {
        double row[D], sum = 0;
        for (int j = 0; j < D; j++) {
            row[j] = 0;
            for (int k = 0; k < 4; k++) row[j] += random_symmetric(&random); /* about normal */
            sum += row[j] * row[j];
        }
        for (int j = 0; j < D; j++) p->x[i][j] = (float)(row[j] / sqrt(sum));
    }
}

static double distance(const Problem *p, const float *w) {
    double sum = 0;
    for (int j = 0; j < D; j++) sum += ((double)w[j] - (double)p->target[j]) * ((double)w[j] - (double)p->target[j]);
    return sqrt(sum) / p->length;
}

/* One run of SGD from `start`. Returns the distance from w* at the end, and the smallest there was. */
static double run(const Problem *p, const Arm *arm, kopt_format format, double size, uint64_t seed, const float *start,
                  double *closest) {
    const int steps = (int)(400 / size);
    unsigned char state[KOPT_STATE_BYTES(D, 2)];
    uint16_t stored[2 * D]; /* D weights of any format */
    float w[D], grad[D];
    uint64_t random = seed;
    double sum = 0;
    int counted = 0;

    kopt_optimizer opt = kopt_sgd(size, 0);
    opt.rounding = arm->rounding;
    opt.residual_rounding = arm->compensation;
    opt.seed = seed;
    kopt_tensor t = kopt_tensor_of(stored, format, grad, KOPT_F32, D, state, sizeof state);
    check(kopt_state_init(&opt, &t, 1, start));
    *closest = HUGE_VAL;
    for (int step = 0; step < steps; step++) {
        const float *x = p->x[random_bits(&random) % SAMPLES];
        float error = 0;
        check(kopt_convert(w, KOPT_F32, stored, format, D));
        const double now = distance(p, w);
        if (now < *closest) *closest = now;
        for (int j = 0; j < D; j++) error += x[j] * (w[j] - p->target[j]);
        for (int j = 0; j < D; j++) grad[j] = error * x[j];
        check(kopt_optimizer_step(&opt, &t, 1));
        if (step >= steps - steps / 10) {
            sum += now;
            counted++;
        }
    }
    return sum / counted;
}

static void experiment(Results *r, kopt_format format, int seeds, int sizes) {
    const double epsilon = format == KOPT_BF16 ? 1.0 / 512 : 1.0 / 4096;
    static const float zero[D];
    static Problem p;
    memset(r, 0, sizeof *r);
    for (int arm = 0; arm < ARMS; arm++)
        for (int k = 0; k < sizes; k++) r->closest[arm][k] = HUGE_VAL;
    for (int seed = 1; seed <= seeds; seed++) {
        uint16_t rounded[D];
        float w[D];
        problem_make(&p, (uint64_t)seed);
        check(kopt_convert(rounded, format, p.target, KOPT_F32, D));
        check(kopt_convert(w, KOPT_F32, rounded, format, D));
        r->rounded += distance(&p, w) / seeds;
        for (int k = 0; k < sizes; k++) {
            const double size = step_size[k];
            const double bound = epsilon * (1 - 2 * size) / (size + epsilon) * p.smallest / p.length;
            r->bound[k] += bound / seeds;
            for (int arm = 0; arm < ARMS; arm++) {
                double closest;
                r->error[arm][k] +=
                    run(&p, &arms[arm], arm == FP32 ? KOPT_F32 : format, size, (uint64_t)seed, zero, &closest) / seeds;
                if (closest / bound < r->closest[arm][k]) r->closest[arm][k] = closest / bound;
            }
        }
    }
}

/* ---- The table and the plot ---- */

/* Of a weight and its residual. */
static int bytes_of(int arm) {
    enum { N = 1 << 20 };
    kopt_optimizer opt = kopt_sgd(1, 0);
    const kopt_tensor t = kopt_tensor_of(NULL, KOPT_BF16, NULL, KOPT_BF16, N, NULL, 0);
    opt.rounding = arms[arm].rounding;
    return arm == FP32 ? 4 : 2 + (int)(kopt_state_size(&opt, &t) / N);
}

static void print_row(const char *name, int bytes, const double *error, const double *bound) {
    printf("\n| %s |", name);
    if (bytes) printf(" %d", bytes);
    printf(" |");
    for (int k = 0; k < STEPS; k++)
        printf(error[k] < bound[k] ? error[k] < 1e-4 ? " **%.0e** |" : " **%.5f** |" : " %.5f |", error[k]);
}

static void print_table(FILE *csv, const Results *r, const char *format) {
    double rounded[STEPS];
    printf("| %s, step | bytes per weight, with its residual |", format);
    for (int k = 0; k < STEPS; k++) {
        rounded[k] = r->rounded;
        printf(" %g |", step_size[k]);
    }
    printf("\n|---|---|");
    for (int k = 0; k < STEPS; k++) printf("---|");
    print_row("lower bound of Theorem 1", 0, r->bound, r->bound);
    for (int arm = 0; arm < ARMS; arm++) {
        print_row(arms[arm].name, bytes_of(arm), r->error[arm], r->bound);
        for (int k = 0; k < STEPS; k++)
            fprintf(csv, "%s,\"%s\",%g,%.9g,%.9g\n", format, arms[arm].name, step_size[k], r->error[arm][k],
                    r->bound[k]);
    }
    print_row("w* itself, rounded", 2, rounded, r->bound);
    printf("\n\n");
}

static const double LEFT = 80, RIGHT = 620, TOP = 80, BOTTOM = 440, LOW = 1e-4, HIGH = 1.0;

static double at_x(double size) { /* from large steps to small ones */
    return LEFT + (RIGHT - LEFT) * log(step_size[0] / size) / log(step_size[0] / step_size[STEPS - 1]);
}

static double at_y(double error) { return BOTTOM - (BOTTOM - TOP) * log(error / LOW) / log(HIGH / LOW); }

static void write_curve(FILE *file, const double *error, const char *name, const char *colour, const char *dash,
                        double width, double *label) {
    fprintf(file, "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"%g\" stroke-dasharray=\"%s\" points=\"", colour,
            width, dash);
    for (int k = 0; k < STEPS; k++) fprintf(file, "%.1f,%.1f ", at_x(step_size[k]), at_y(error[k]));
    const double end = at_y(error[STEPS - 1]);
    *label = end + 5 > *label + 20 ? end + 5 : *label + 20; /* below the one before */
    fprintf(file, "\"/>\n<path d=\"M%g %.1fL%g %.1f\" stroke=\"%s\" stroke-width=\"1.5\"/>", RIGHT + 4, end, RIGHT + 18,
            *label - 5, colour);
    fprintf(file, "<text x=\"%g\" y=\"%.1f\">%s</text>\n", RIGHT + 23, *label, name);
}

static void write_svg(FILE *file, const Results *r) {
    static const int order[] = {NEAREST, STOCHASTIC, KAHAN_NEAREST, EXACT, COMPACT, KAHAN}; /* from top to bottom */
    double label = 0;
    fputs("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 900 510\" width=\"900\" height=\"510\"\n"
          "     font-family=\"Helvetica, Arial, sans-serif\" font-size=\"14\" fill=\"#24292f\">\n"
          "<rect width=\"900\" height=\"510\" fill=\"#ffffff\"/>\n",
          file);
    fprintf(file,
            "<text x=\"%g\" y=\"34\" font-size=\"19\" font-weight=\"bold\">Rounded to nearest, smaller "
            "steps end farther from the solution</text>\n",
            LEFT);
    fprintf(file,
            "<text x=\"%g\" y=\"58\" fill=\"#57606a\">Least squares by SGD: relative distance of the weights "
            "from the solution after 400 / step steps</text>\n",
            LEFT);
    for (double error = LOW; error <= HIGH * 1.01; error *= 10) {
        fprintf(file, "<path d=\"M%g %.1fH%g\" stroke=\"#e4e7eb\"/>", LEFT, at_y(error), RIGHT);
        fprintf(file, "<text x=\"%g\" y=\"%.1f\" text-anchor=\"end\">%g</text>\n", LEFT - 10, at_y(error) + 5, error);
    }
    for (int k = 0; k < STEPS; k++) {
        fprintf(file, "<path d=\"M%.1f %gv6\" stroke=\"#57606a\"/>", at_x(step_size[k]), BOTTOM);
        fprintf(file, "<text x=\"%.1f\" y=\"%g\" text-anchor=\"middle\">%g</text>\n", at_x(step_size[k]), BOTTOM + 24,
                step_size[k]);
    }
    fprintf(file, "<path d=\"M%g %gV%gH%g\" fill=\"none\" stroke=\"#57606a\"/>\n", LEFT, TOP, BOTTOM, RIGHT);
    fprintf(file, "<text x=\"%g\" y=\"%g\" text-anchor=\"middle\">step</text>\n", (LEFT + RIGHT) / 2, BOTTOM + 48);
    for (size_t i = 0; i < sizeof order / sizeof *order; i++) {
        const Arm *arm = &arms[order[i]];
        write_curve(file, r->error[order[i]], arm->name, arm->colour, arm->dash, arm->width, &label);
        if (i == 0) write_curve(file, r->bound, "lower bound (Theorem 1)", "#000000", "2 4", 2.0, &label);
    }
    fputs("</svg>\n", file);
}

static FILE *open_output(const char *path) {
    FILE *file = fopen(path, "w");
    if (file) return file;
    fprintf(stderr, "theorem1: cannot write %s\n", path);
    exit(2);
}

/* ---- The test ---- */

static void test(const Results *r, const char *format, int sizes) {
    const int last = sizes - 1;
    for (int k = 0; k < sizes; k++) {
        ok(r->closest[NEAREST][k] >= 4, "%s, step %g: nearest stays above four times the bound, always (%.2f times)",
           format, step_size[k], r->closest[NEAREST][k]);
        if (k > 0)
            ok(r->error[NEAREST][k] > r->error[NEAREST][k - 1],
               "%s, step %g: nearest ends farther (%.4f) than "
               "with %g (%.4f)",
               format, step_size[k], r->error[NEAREST][k], step_size[k - 1], r->error[NEAREST][k - 1]);
    }
    for (int arm = 0; arm < ARMS; arm++) {
        const double *error = r->error[arm], *nearest = r->error[NEAREST];
        if (arm == NEAREST) continue;
        for (int k = 2; k < sizes; k++)
            ok(error[k] < nearest[k] / 8, "%s, step %g: %s ends at less than an eighth of nearest (%.5f, %.4f)", format,
               step_size[k], arms[arm].name, error[k], nearest[k]);
        if (arm != KAHAN_NEAREST && arm != FP32)
            ok(error[last] < 1.5 * error[1], "%s: %s is as good with step %g (%.5f) as with %g (%.5f)", format,
               arms[arm].name, step_size[last], error[last], step_size[1], error[1]);
    }
}

/* From w* itself, rounded: below the bound, and not farther from w* than it began. */
static void test_start(void) {
    static Problem p;
    problem_make(&p, 1);
    for (int k = 1; k < 4; k++) {
        const double bound = (1 - 2 * step_size[k]) / (512 * step_size[k] + 1) * p.smallest / p.length;
        uint16_t rounded[D];
        float w[D];
        double closest;
        check(kopt_convert(rounded, KOPT_BF16, p.target, KOPT_F32, D));
        check(kopt_convert(w, KOPT_F32, rounded, KOPT_BF16, D));
        const double first = distance(&p, w);
        const double end = run(&p, &arms[NEAREST], KOPT_BF16, step_size[k], 1, p.target, &closest);
        ok(first < bound && closest >= first && end < 1.001 * first,
           "bf16, step %g: nearest, begun at w* rounded (%.5f), stays there (%.5f), below the bound (%.5f)",
           step_size[k], first, end, bound);
    }
}

/* One weight whose last step, rounded, is almost twice as long: it ends 1.03 times the bound away. */
static void test_tight(void) {
    const float target = 3.995f, start = 0;
    const double step = 0.3, bound = (1 - 2 * step) / (512 * step + 1) * (double)target;
    kopt_bf16 w;
    float grad, now;
    kopt_optimizer opt = kopt_sgd(step, 0);
    opt.rounding = KOPT_NEAREST;
    const kopt_tensor t = kopt_tensor_of(&w, KOPT_BF16, &grad, KOPT_F32, 1, NULL, 0);
    check(kopt_state_init(&opt, &t, 1, &start));
    for (int i = 0; i < 100; i++) {
        grad = kopt_f32_from_bf16(w) - target;
        check(kopt_optimizer_step(&opt, &t, 1));
    }
    now = kopt_f32_from_bf16(w) - target;
    ok(fabs((double)now) >= bound && fabs((double)now) < 1.1 * bound, "one weight of %g, step %g: %.4f, bound %.4f",
       (double)target, step, fabs((double)now), bound);
}

int main(int argc, char **argv) {
    static Results bf16, fp16;
    if (argc > 1 && strcmp(argv[1], "test") == 0) {
        experiment(&bf16, KOPT_BF16, 2, 5);
        test(&bf16, "bf16", 5);
        experiment(&fp16, KOPT_FP16, 1, 5);
        test(&fp16, "fp16", 5);
        test_start();
        test_tight();
        return done();
    }
    if (argc > 1) {
        fputs("usage: theorem1 [test]\n", stderr);
        return 2;
    }
    FILE *csv = open_output("build/bench/theorem1.csv"), *svg = open_output("build/bench/theorem1.svg");
    fputs("format,rounding,step,error,bound\n", csv);
    experiment(&bf16, KOPT_BF16, SEEDS, STEPS);
    print_table(csv, &bf16, "bf16");
    fflush(stdout);
    experiment(&fp16, KOPT_FP16, SEEDS, STEPS);
    print_table(csv, &fp16, "fp16");
    write_svg(svg, &bf16);
    fclose(csv);
    fclose(svg);
    puts("Bold: below the bound. The curves are in build/bench/theorem1.svg, the figures in build/bench/theorem1.csv.");
    return 0;
}
