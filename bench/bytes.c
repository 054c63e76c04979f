/* What each number of bytes costs: excess risk over fp32, on problems whose noise 16-bit weights cannot hide.

     ./build.sh bench bytes [SEEDS]        8 seeds; prints a table in Markdown and draws build/bench/bytes.svg
     ./build.sh bench bytes margins        fp32 alone, on 16 other seeds: the margins of equivalence

   Least squares: 32 weights, drawn from N(0, s^2), targets with noise 1, batches of 8, 20,000 steps of AdamW without
   decay, cosine to 0; s is the size of the weights, lr 3e-3 s. The risk is |w - w*|^2 / 2, in nats of a Gaussian above
   the best. Lion: the same, lr 1e-3, betas .9 and .99. Logistic regression: 32 weights of size 1/3, 60,000 steps at a
   constant 1e-3; the mean loss of the last 6,000 steps on 2,048 held-out examples, above that of w*. Embeddings: 64
   rows of 32 weights, chosen by Zipf's law, batches of 4, 10,000 steps; the mean risk of the rarest three quarters of
   the rows. Fine-tuning: 3,000 steps of 1e-6 from 256 bf16 weights of size 1, in 8 problems of 32, to others at a
   distance of N(0, d^2), which is 4 or .4 ulps of a weight of 1; targets with noise .1, batches of 32.
   All arms of a seed see the same examples. Each cell is the mean over the seeds of the difference to fp32, times 1e4,
   and the half width of Student's 95 % interval. The weights are those that a forward pass reads. */
#define KAHAN_OPT_IMPLEMENTATION
#include "../kahan_opt.h"
#include "bytes.h"
#include "bytes_peers.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 2048, WIDTH = 32, BATCH = 256, HELD_OUT = 2048, SEEDS = 32, MARGIN_SEEDS = 16, LAST = 300 };

/* The rows of the table: the arms of bytes.h, four more, and the peers. */
enum {
    ROUNDED = ARMS,
    FP16,
    DRAWN,
    AVERAGED,
    FIRST_PEER,
    ROWS = FIRST_PEER + PEERS,
    FP32 = 0,
    KAHAN = 1,
    FEEDBACK = 5
};
static const char *const extra_name[] = {"fp32, rounded to bf16 at the end", "KAHAN, fp16", "KAHAN, drawn residuals",
                                         "FEEDBACK, mean of the last 300 steps"};
static const char *const extra_bytes[] = {"16", "10", "10", "12"};

typedef enum kind { SQUARES, LION, LOGISTIC, ZIPF, TUNING } kind;
typedef struct task {
    const char *name;
    kind kind;
    double size, noise, distance, lr, beta1, beta2;
    int rows, width, batch, steps;
    double margin; /* of equivalence, times 1e4: a quarter of the standard deviation of fp32 over seeds */
} task;
/* clang-format off */
static const task tasks[] = {
    {"least squares, weights of size 1", SQUARES, 1, 1, 0, 3e-3, .9, .999, 1, 32, 8, 20000, .34},
    {"of size 10", SQUARES, 10, 1, 0, 3e-2, .9, .999, 1, 32, 8, 20000, .63},
    {"beta1 .99", SQUARES, 1, 1, 0, 3e-3, .99, .999, 1, 32, 8, 20000, .37},
    {"beta1 .999, beta2 .9999", SQUARES, 1, 1, 0, 3e-3, .999, .9999, 1, 32, 8, 20000, .61},
    {"logistic regression", LOGISTIC, 1. / 3, 0, 0, 1e-3, .9, .999, 1, 32, 8, 60000, 1.6},
    {"Lion", LION, 1, 1, 0, 1e-3, .9, .99, 1, 32, 8, 20000, .30},
    {"Zipf embeddings", ZIPF, 1, 1, 0, 3e-3, .9, .999, 64, 32, 4, 10000, 1100},
    {"fine-tuning, 4 ulps away", TUNING, 1, .1, .02, 1e-6, .9, .999, 8, 32, 256, 3000, 7.8},
    {".4 ulps away", TUNING, 1, .1, .002, 1e-6, .9, .999, 8, 32, 256, 3000, .062}};
/* clang-format on */
enum { TASKS = sizeof tasks / sizeof *tasks, FIRST_TUNING = TASKS - 2 };

static uint64_t random_state;
static double uniform(void) { /* xorshift64* */
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return ((double)((random_state * 0x2545F4914F6CDD1Du) >> 11) + .5) / 9007199254740992.0;
}
static void normals(double *x, int n) { /* Box and Muller; n is even */
    for (; n > 0; n -= 2, x += 2) {
        const double r = sqrt(-2 * log(uniform())), angle = 6.283185307179586 * uniform();
        x[0] = r * cos(angle);
        x[1] = r * sin(angle);
    }
}

static void must(kopt_result result) {
    if (result == KOPT_OK) return;
    fprintf(stderr, "bytes: %s\n", kopt_result_string(result));
    exit(1);
}

static double dot(const double *a, const double *b, int n) { /* n is a multiple of 8 */
    double sum[8] = {0};
    int i, k;
    for (i = 0; i < n; i += 8)
        for (k = 0; k < 8; k++) sum[k] += a[i + k] * b[i + k];
    return sum[0] + sum[1] + (sum[2] + sum[3]) + (sum[4] + sum[5] + (sum[6] + sum[7]));
}

/* Has the table this cell? Lion has no second moment, and FEEDBACK refuses it; bitsandbytes keeps the moments of
   embeddings in 32 bits. */
static int has_cell(const task *t, int row) {
    if (t->kind == ZIPF && row >= FIRST_PEER && peers[row - FIRST_PEER].weight == MASTER_WEIGHT) return 0;
    if (row == DRAWN || row == AVERAGED) return t->kind == TUNING;
    if (t->kind != LION || row == ROUNDED || row == FP16) return 1;
    if (row >= FIRST_PEER) return peers[row - FIRST_PEER].has_lion;
    return arms[row].rounding != KOPT_FEEDBACK && arms[row].first == arms[row].second;
}

/* An arm in training. */
typedef struct trainee {
    kopt_optimizer o;
    kopt_tensor tensor;
    float w32[MOST], g[MOST];
    uint16_t w16[MOST];
    uint64_t state[KOPT_STATE_BYTES(MOST, 16) / 8 + 1];
    double w[MOST], sum[MOST]; /* what a forward pass reads, and its sum over the last steps */
    peer_state peer;
} trainee;
static trainee trainees[ROWS];

static void begin(const task *t, int row, int seed, const float *first) {
    trainee *const r = &trainees[row];
    const arm *const a = &arms[row == DRAWN || row == FP16 ? KAHAN : row];
    const kopt_format format = row == FP16 ? KOPT_FP16 : a->weight;
    const int n = t->rows * t->width;
    r->o = t->kind == LION ? kopt_lion(t->lr) : kopt_adamw(t->lr);
    r->o.weight_decay = 0;
    r->o.beta1 = t->beta1;
    r->o.beta2 = t->beta2;
    r->o.seed = (uint64_t)seed;
    memset(r->sum, 0, sizeof r->sum);
    if (row >= FIRST_PEER) {
        memset(&r->peer, 0, sizeof r->peer);
        memcpy(r->peer.weight, first, sizeof *first * (size_t)n);
        r->peer.random = 88172645463325252u + 1013u * (uint64_t)seed;
        return;
    }
    r->o.rounding = a->rounding;
    r->o.first_moment_format = a->first;
    r->o.second_moment_format = a->second;
    r->tensor = kopt_tensor_of(format == KOPT_F32 ? (void *)r->w32 : r->w16, format, r->g, KOPT_F32, (size_t)n,
                               r->state, sizeof r->state);
    must(kopt_state_init(&r->o, &r->tensor, 1, first));
    if (row == DRAWN) must(kopt_state_dither(&r->o, &r->tensor, 1));
}

/* The weights that a forward pass of this row reads. */
static const double *weights(const task *t, int row) {
    trainee *const r = &trainees[row];
    const int n = t->rows * t->width;
    int i;
    if (row == ROUNDED)
        for (i = 0; i < n; i++) r->w[i] = to_bf16(trainees[FP32].w32[i]);
    else if (row == AVERAGED)
        for (i = 0; i < n; i++) r->w[i] = trainees[FEEDBACK].sum[i] / LAST;
    else if (row >= FIRST_PEER)
        for (i = 0; i < n; i++) r->w[i] = r->peer.weight[i];
    else if (row == FP32)
        for (i = 0; i < n; i++) r->w[i] = r->w32[i];
    else if (row == FP16)
        for (i = 0; i < n; i++) r->w[i] = kopt_f32_from_fp16(r->w16[i]);
    else
        for (i = 0; i < n; i++) r->w[i] = kopt_f32_from_bf16(r->w16[i]);
    return r->w;
}

typedef struct example {
    double x[WIDTH + 2], label;
    int row;
} example;

/* The risk of each row at the end; in fine-tuning also its share of fp32's way, and the rms distance to it in ulps. */
static void run(const task *t, int seed, int rows, double *risk, double *share, double *noise) {
    static double held_out[HELD_OUT][WIDTH], label[HELD_OUT], best[MOST];
    static float first[MOST];
    static double gradient[MOST];
    static double until[MOST]; /* the probability of a row or one before it */
    const int n = t->rows * t->width;
    double least = 0; /* the held-out loss of w* */
    int i, b, k, row, measured = 0;
    random_state = 88172645463325252u + 977u * (uint64_t)seed;
    for (i = 0; i < 30; i++) uniform();
    normals(best, n);
    for (i = 0; i < n; i++) best[i] *= t->size, first[i] = 0;
    if (t->kind == TUNING) {
        double way[MOST];
        normals(way, n);
        for (i = 0; i < n; i++) first[i] = to_bf16((float)best[i]), best[i] = first[i] + t->distance * way[i];
    }
    for (b = 0; b < HELD_OUT && t->kind == LOGISTIC; b++) {
        normals(held_out[b], n);
        label[b] = uniform() < 1 / (1 + exp(-dot(held_out[b], best, n)));
        least += log1p(exp((1 - 2 * label[b]) * dot(held_out[b], best, n))) / HELD_OUT;
    }
    for (i = 0; i < t->rows; i++) until[i] = (i > 0 ? until[i - 1] : 0) + 1. / (i + 1);
    for (row = 0; row < rows; row++) {
        risk[row] = 0;
        if (has_cell(t, row) && row != ROUNDED && row != AVERAGED) begin(t, row, seed, first);
    }
    for (k = 0; k <= t->steps; k++) {
        static example batch[BATCH];
        const double rate = t->kind == LOGISTIC || t->kind == TUNING
                                ? t->lr
                                : kopt_cosine_lr((uint32_t)k, 0, (uint32_t)t->steps, t->lr, 0);
        for (b = 0; b < t->batch; b++) {
            example *const e = &batch[b];
            e->row = t->kind == TUNING ? b % t->rows : 0;
            if (t->kind == ZIPF) {
                const double u = uniform() * until[t->rows - 1];
                while (until[e->row] < u) e->row++;
            }
            normals(e->x, t->width + 2);
            e->label = dot(e->x, best + e->row * t->width, t->width);
            if (t->kind == LOGISTIC)
                e->label = uniform() < 1 / (1 + exp(-e->label));
            else
                e->label += t->noise * e->x[t->width];
        }
        for (row = 0; row < rows; row++) {
            trainee *const r = &trainees[row];
            const double *w;
            if (!has_cell(t, row)) continue;
            if (t->kind == LOGISTIC && k > t->steps - 6000 && k % 60 == 0) {
                double loss = 0;
                w = weights(t, row);
                for (b = 0; b < HELD_OUT; b++) loss += log1p(exp((1 - 2 * label[b]) * dot(held_out[b], w, n)));
                risk[row] += loss / HELD_OUT;
                measured += row == 0;
            }
            if (k == t->steps || row == ROUNDED || row == AVERAGED) continue;
            w = weights(t, row);
            memset(gradient, 0, sizeof *gradient * (size_t)n);
            for (b = 0; b < t->batch; b++) {
                const example *const e = &batch[b];
                double *const to = gradient + e->row * t->width;
                const double y = dot(e->x, w + e->row * t->width, t->width);
                const double error = ((t->kind == LOGISTIC ? 1 / (1 + exp(-y)) : y) - e->label) / t->batch;
                for (i = 0; i < t->width; i++) to[i] += error * e->x[i];
            }
            for (i = 0; i < n; i++) r->g[i] = (float)gradient[i];
            r->o.lr = rate;
            if (row >= FIRST_PEER)
                peer_step(&peers[row - FIRST_PEER], &r->peer, r->g, n, &r->o, k + 1, t->kind == LION);
            else
                must(kopt_optimizer_step(&r->o, &r->tensor, 1));
            if (row == FEEDBACK && t->kind == TUNING && k >= t->steps - LAST) {
                w = weights(t, row);
                for (i = 0; i < n; i++) r->sum[i] += w[i];
            }
        }
    }
    for (row = 0; row < rows; row++) {
        double along = 0, way = 0, square = 0;
        const double *w, *const fp32 = trainees[FP32].w;
        if (!has_cell(t, row)) continue;
        w = weights(t, row);
        if (t->kind == LOGISTIC) risk[row] = risk[row] / measured - least;
        for (i = t->kind == ZIPF ? n / 4 : 0; i < n && t->kind != LOGISTIC; i++)
            risk[row] += (w[i] - best[i]) * (w[i] - best[i]) / 2;
        if (t->kind == ZIPF) risk[row] /= t->rows * 3 / 4;
        if (t->kind != TUNING) continue;
        for (i = 0; i < n; i++) {
            const double moved = fp32[i] - first[i], off = (w[i] - fp32[i]) / ldexp(1, ilogb(first[i]) - 7);
            along += (w[i] - first[i]) * moved;
            way += moved * moved;
            square += off * off;
        }
        share[row] = along / way;
        noise[row] = sqrt(square / n);
    }
}

/* Student's 97.5 % quantile with n - 1 degrees of freedom. */
static double quantile(int n) {
    static const double table[] = {12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201};
    return n - 2 < 11 ? table[n - 2] : 2.04 + 2 / (double)n;
}

/* The mean of n numbers, and the half width of its interval. */
static double mean_of(const double *x, int n, double *half_width) {
    double mean = 0, square = 0;
    int i;
    for (i = 0; i < n; i++) mean += x[i] / n;
    for (i = 0; i < n; i++) square += (x[i] - mean) * (x[i] - mean) / (n - 1);
    *half_width = quantile(n) * sqrt(square / n);
    return mean;
}

static const char *name_of(int row) {
    return row < ARMS ? arms[row].name : row < FIRST_PEER ? extra_name[row - ARMS] : peers[row - FIRST_PEER].name;
}
static const char *bytes_of(int row) {
    return row < ARMS ? arms[row].bytes : row < FIRST_PEER ? extra_bytes[row - ARMS] : peers[row - FIRST_PEER].bytes;
}

/* Two digits of the half width, without an exponent. */
static void print_cell(double mean, double half_width, double margin) {
    const char *const bold = fabs(mean) + half_width <= margin ? "**" : "";
    int decimals;
    if (mean >= 1e5) {
        printf(" above 1e5 |");
        return;
    }
    decimals = 1 - (int)floor(log10(fmax(half_width, 1e-9)));
    decimals = decimals < 0 ? 0 : decimals > 3 ? 3 : decimals;
    printf(" %s%+.*f±%.*f%s |", bold, decimals, mean, decimals, half_width, bold);
}

static double mean[TASKS][ROWS];

/* ---- The plot: a panel for each task, without PyTorch in fp16, which is far above ---- */

enum { PANEL_X = 300, PANEL_Y = 240 };

static void write_marker(FILE *file, int row, double x, double y) {
    static const char *const colour[] = {"", "#f08c00", "#0b3d91", "#57b894", "", "#8250df"}; /* by rounding */
    static const char *const letters[] = {"C+", "b", "C", "o", "o16", "t", "", "F", "t"};     /* of peers */
    if (row >= FIRST_PEER) { /* those in fp16 left of their place, where no other is */
        const int fp16 = peers[row - FIRST_PEER].weight == KAHAN_FP16_WEIGHT;
        fprintf(file, "<text x=\"%.1f\" y=\"%.1f\" font-size=\"13\"%s>%s</text>\n", fp16 ? x - 6 : x + 6, y + 4,
                fp16 ? " text-anchor=\"end\"" : "", letters[row - FIRST_PEER]);
    } else
        fprintf(file, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"5\" fill=\"%s\" fill-opacity=\"0.85\"/>\n", x, y,
                colour[arms[row].rounding]);
}

static int is_drawn(const task *t, int row) {
    if (row >= FIRST_PEER) return has_cell(t, row) && peers[row - FIRST_PEER].weight != FP16_WEIGHT;
    return row <= ROUNDED && has_cell(t, row);
}

static void write_svg(FILE *file) {
    static const char *const legend[] = {"KAHAN", "COMPACT", "FEEDBACK", "STOCHASTIC"};
    static const int of_legend[] = {1, 3, 5, 6};
    int j, row;
    fputs(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 930 880\" width=\"930\" height=\"880\"\n"
        "     font-family=\"Helvetica, Arial, sans-serif\" font-size=\"12\" fill=\"#24292f\">\n"
        "<rect width=\"930\" height=\"880\" fill=\"#ffffff\"/>\n"
        "<text x=\"50\" y=\"30\" font-size=\"19\" font-weight=\"bold\">Excess over fp32, times 1e4, against bytes per "
        "parameter</text>\n<text x=\"50\" y=\"52\" fill=\"#57606a\">Grey: within the margin of equivalence or below "
        "fp32, at the bottom. Dashed: fp32, rounded to bf16 at the end.</text>\n",
        file);
    for (j = 0; j < TASKS; j++) {
        const double left = 58 + j % 3 * PANEL_X, top = 90 + j / 3 * PANEL_Y, width = 240, height = 170;
        const double low = tasks[j].margin, bottom = top + height;
        double decades = 1;
        for (row = 1; row < ROWS; row++)
            if (is_drawn(&tasks[j], row)) decades = fmax(decades, log10(fmax(mean[j][row], low) / low) + .1);
        fprintf(file, "<text x=\"%g\" y=\"%g\" font-weight=\"bold\">%s</text>\n", left, top - 8, tasks[j].name);
        fprintf(file, "<rect x=\"%g\" y=\"%g\" width=\"%g\" height=\"14\" fill=\"#e4e7eb\"/>\n", left, bottom - 14,
                width);
        fprintf(file, "<path d=\"M%g %gV%gH%g\" fill=\"none\" stroke=\"#57606a\"/>\n", left, top, bottom, left + width);
        for (row = 6; row <= 12; row += 2)
            fprintf(file, "<text x=\"%.1f\" y=\"%g\" text-anchor=\"middle\">%d</text>\n",
                    left + 15 + (row - 6) * (width - 30) / 6, bottom + 16, row);
        for (row = 0; row <= 5; row++) {
            const double exponent = ceil(log10(low)) + row,
                         y = bottom - 14 - (exponent - log10(low)) * (height - 20) / decades;
            if (y < top) continue;
            fprintf(file, "<path d=\"M%g %.1fH%g\" stroke=\"#e4e7eb\"/>", left, y, left + width);
            fprintf(file, "<text x=\"%g\" y=\"%.1f\" text-anchor=\"end\">%g</text>\n", left - 5, y + 4,
                    pow(10, exponent));
        }
        for (row = 1; row < ROWS; row++) {
            const double above = log10(fmax(mean[j][row], low) / low),
                         y = bottom - 14 - above * (height - 20) / decades;
            const double at = mean[j][row] <= low ? bottom - 7 : y;
            if (!is_drawn(&tasks[j], row)) continue;
            if (row == ROUNDED)
                fprintf(file, "<path d=\"M%g %.1fH%g\" stroke=\"#57606a\" stroke-dasharray=\"4 3\"/>\n", left, at,
                        left + width);
            else
                write_marker(file, row, left + 15 + (atof(bytes_of(row)) - 6) * (width - 30) / 6, at);
        }
    }
    for (j = 0; j < 4; j++) {
        write_marker(file, of_legend[j], 60 + j * 110, 830);
        fprintf(file, "<text x=\"%d\" y=\"834\">%s</text>\n", 70 + j * 110, legend[j]);
    }
    fputs(
        "<text x=\"55\" y=\"854\">C, C+: Collage-light, -plus; b: bitsandbytes, fp32 weights; F: FlashOptim; o: "
        "optimi, o16: in fp16; t: torchao.</text>\n<text x=\"55\" y=\"871\">All of these are written anew. PyTorch in "
        "fp16 is far above.</text>\n</svg>\n",
        file);
}

static FILE *open_output(const char *path) {
    FILE *const file = fopen(path, "w");
    if (file) return file;
    fprintf(stderr, "bytes: cannot write %s\n", path);
    exit(1);
}

/* The margins: fp32 alone. */
static void print_margins(void) {
    int j, s;
    for (j = 0; j < TASKS; j++) {
        double x[MARGIN_SEEDS], share, noise, half_width;
        for (s = 0; s < MARGIN_SEEDS; s++) run(&tasks[j], 1001 + s, 1, &x[s], &share, &noise);
        mean_of(x, MARGIN_SEEDS, &half_width);
        printf("%-34s %.2g\n", tasks[j].name, 1e4 * half_width / quantile(MARGIN_SEEDS) * sqrt(MARGIN_SEEDS) / 4);
        fflush(stdout);
    }
}

static double risk[TASKS][SEEDS][ROWS], share[SEEDS][ROWS], noise[SEEDS][ROWS]; /* the last two: of the first tuning */

int main(int argc, char **argv) {
    const int margins = argc > 1 && strcmp(argv[1], "margins") == 0, seeds = argc > 1 && !margins ? atoi(argv[1]) : 8;
    FILE *csv, *svg;
    int i, j, s, cells = 0, level = 0;
    if (margins) {
        print_margins();
        return 0;
    }
    if (seeds < 2 || seeds > SEEDS) {
        fprintf(stderr, "usage: bytes [SEEDS | margins]   2 to %d; 8\n", SEEDS);
        return 2;
    }
    csv = open_output("build/bench/bytes.csv");
    svg = open_output("build/bench/bytes.svg");
    fputs("task,method,seed,risk\n", csv);
    for (j = 0; j < TASKS; j++)
        for (s = 0; s < seeds; s++) {
            double no_share[ROWS], no_noise[ROWS];
            run(&tasks[j], s + 1, ROWS, risk[j][s], j == FIRST_TUNING ? share[s] : no_share,
                j == FIRST_TUNING ? noise[s] : no_noise);
            for (i = 0; i < ROWS; i++)
                if (has_cell(&tasks[j], i))
                    fprintf(csv, "\"%s\",\"%s\",%d,%.9g\n", tasks[j].name, name_of(i), s + 1, risk[j][s][i]);
            fflush(csv);
        }
    printf("| | bytes |");
    for (j = 0; j < TASKS; j++) printf(" %s |", tasks[j].name);
    printf(" its share of fp32's way; noise, ulps |\n|---|---|");
    for (j = 0; j <= TASKS; j++) printf("---|");
    printf("\n");
    for (i = 0; i < ROWS; i++) {
        double x[SEEDS], half_width, wide, at;
        printf("| %s | %s |", name_of(i), bytes_of(i));
        for (j = 0; j < TASKS; j++) {
            if (!has_cell(&tasks[j], i)) {
                printf(" |");
                continue;
            }
            for (s = 0; s < seeds; s++) x[s] = 1e4 * (risk[j][s][i] - (i == FP32 ? 0 : risk[j][s][FP32]));
            mean[j][i] = mean_of(x, seeds, &half_width);
            if (i == FP32) {
                printf(" %.4g; margin %.2g |", mean[j][i], tasks[j].margin);
                continue;
            }
            if (!(mean[j][i] < 1e5)) mean[j][i] = 1e5; /* also no number */
            print_cell(mean[j][i], half_width, tasks[j].margin);
            cells++;
            level += fabs(mean[j][i]) + half_width <= tasks[j].margin;
        }
        for (s = 0; s < seeds; s++) x[s] = share[s][i];
        at = mean_of(x, seeds, &half_width);
        for (s = 0; s < seeds; s++) x[s] = noise[s][i];
        printf(i == FP32 ? " |\n" : " %.2f±%.2f; %.2f |\n", at, half_width, mean_of(x, seeds, &wide));
    }
    printf(
        "\n%d comparisons with fp32, not corrected for their number; %d are level, bold: the whole interval is within "
        "the margin.\n",
        cells, level);
    write_svg(svg);
    return (fclose(svg) | fclose(csv)) != 0;
}
