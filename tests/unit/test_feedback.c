/* test_feedback.c - KOPT_FEEDBACK: no rounding error of a weight is lost; a step has the weights of STOCHASTIC;
   small updates and decay arrive, with less noise; a learning rate that rises does no harm, however it rises and
   whatever a tensor was left out of; whole trainings end where fp32 ends; what cannot pay is refused. The bits are in
   test_step_bits.c. Argument "quick": shorter runs. */
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"

#include "tap.h"
#include "reference.h"
#include "inputs.h"

#include <stdlib.h>

enum { MOST = 4096, POOL = 1 << 16 };

/* fp32 everywhere; FEEDBACK with moments of fp32, of 16 bits, with the second one of 8 bits, with both; STOCHASTIC with
   moments of 16 and of 8 bits. */
typedef enum arm { FP32, WIDE, EIGHT, SEVEN, SIX, NOISY, NOISY_SIX, ARMS } arm;
static const char *const arm_name[ARMS] = {"fp32",
                                           "fp32 moments",
                                           "16-bit moments",
                                           "8-bit second moments",
                                           "8-bit moments",
                                           "STOCHASTIC, 16-bit moments",
                                           "STOCHASTIC, 8-bit moments"};

static kopt_optimizer with_arm(kopt_optimizer o, arm a) {
    o.rounding = a < NOISY ? KOPT_FEEDBACK : KOPT_STOCHASTIC;
    o.first_moment_format = a <= WIDE ? KOPT_F32 : a == SIX || a == NOISY_SIX ? KOPT_Q8 : KOPT_BF16;
    o.second_moment_format = a <= WIDE ? KOPT_F32 : a == EIGHT || a == NOISY ? KOPT_BF16 : KOPT_Q8;
    return o;
}

static void must(int good, const char *what) {
    if (good) return;
    printf("Bail out! %s\n", what);
    exit(1);
}

/* One tensor in training, its gradients at g. */
typedef struct training {
    kopt_optimizer opt;
    kopt_tensor t;
    unsigned char weight[4 * MOST], state[KOPT_STATE_BYTES(MOST, 16)];
    float grad[MOST];
} training;

static void start(training *r, kopt_optimizer opt, arm a, size_t n, const float *weights) {
    r->opt = with_arm(opt, a);
    r->t = kopt_tensor_of(r->weight, a == FP32 ? KOPT_F32 : KOPT_BF16, r->grad, KOPT_F32, n, r->state, 0);
    r->t.state_size = kopt_state_size(&r->opt, &r->t);
    must(r->t.state_size <= sizeof r->state, "KOPT_STATE_BYTES");
    must(kopt_state_init(&r->opt, &r->t, 1, weights) == KOPT_OK, "kopt_state_init");
}

static void train(training *r, long steps) {
    while (steps-- > 0) must(kopt_optimizer_step(&r->opt, &r->t, 1) == KOPT_OK, "kopt_optimizer_step");
}

static float weight_of(const kopt_tensor *t, size_t i) {
    return ref_float(ref_widen(t->weight_format, ref_get(t->weight, ref_width(t->weight_format), i)));
}

/* The distance between two bf16 numbers of the size of x. */
static double ulp(double x) {
    int exponent;
    frexp(x, &exponent);
    return ldexp(1, exponent - 8);
}

/* Numbers of the standard normal distribution; a step takes those from a random place on as its gradients. */
static float pool[POOL + MOST];
static uint32_t draws = 1;
static float *some(void) { return pool + scaled_to(mixed32(&draws), POOL); }

static void fill(float *w, size_t n, float low, float high) {
    size_t i;
    for (i = 0; i < n; ++i) w[i] = low + (high - low) * ((float)i + 0.5f) / (float)n;
}

/* ---- No error is lost ------------------------------------------------------------------------------------------- */

/* SGD with fp32 moments: the weight less all that its first moment will still move it by is, in exact arithmetic, the
   start less the sum of all gradients times rate * (1 - dampening) / (1 - momentum), and less the decay of each weight,
   whatever was rounded to what. The largest deviation in ulps. */
static double lost(kopt_optimizer o, arm a, double rate_scale, int steps) {
    enum { N = 1000 };
    static training r;
    static double exact[N];
    float first[N];
    const double rate = (double)(float)o.lr * rate_scale, b = (double)(float)o.momentum;
    const double decay = (double)(float)o.lr * (double)(float)o.weight_decay * rate_scale;
    double worst = 0, m, ahead = rate * b / (1 - b);
    int k;
    size_t i;
    fill(first, N, 1.01f, 1.99f);
    if (o.nesterov) ahead *= b;
    start(&r, o, a, N, first);
    r.t.rate_scale = rate_scale;
    for (i = 0; i < N; ++i) exact[i] = (double)weight_of(&r.t, i);
    for (k = 0; k < steps; ++k) {
        for (i = 0; i < N; ++i) {
            r.grad[i] = 0.02f * (uniform32(&draws) - 0.5f);
            exact[i] -=
                rate * (k ? 1 - o.dampening : 1) / (1 - b) * (double)r.grad[i] + decay * (double)weight_of(&r.t, i);
        }
        train(&r, 1);
    }
    for (i = 0; i < N; ++i) {
        m = (double)ref_float(ref_get(r.state + ref_layout_of(&r.opt, r.t.weight_format, N).moment[0], 4, i));
        worst = fmax(worst, fabs((double)weight_of(&r.t, i) - ahead * m - exact[i]) / ulp(1.5));
    }
    return worst;
}

static void check_conservation(int quick) {
    static const char *const name[] = {"momentum", "dampening", "Nesterov", "decoupled decay", "rate_scale"};
    int k;
    for (k = 0; k < 5; ++k) {
        kopt_optimizer o = kopt_sgd(1e-3, k == 2 ? 0.8 : 0.9);
        double feedback, noisy;
        if (k == 1) o.dampening = 0.25;
        if (k == 2) o.nesterov = 1;
        if (k == 3) o.decay_mode = KOPT_DECAY_DECOUPLED, o.weight_decay = 0.01;
        feedback = lost(o, WIDE, k == 4 ? 0.5 : 1, quick ? 1000 : 10000);
        o.rounding = KOPT_STOCHASTIC;
        noisy = lost(o, NOISY, k == 4 ? 0.5 : 1, quick ? 1000 : 10000);
        ok(feedback < 1e-3 && noisy > 2, "SGD, %s: of all rounding errors %.1e ulps are lost (STOCHASTIC: %.3g)",
           name[k], feedback, noisy);
    }
}

/* ---- A step has the weights of STOCHASTIC ----------------------------------------------------------------------- */

/* Each rule from the same state, with a rate that does not rise: all but the first moment are those of STOCHASTIC; with
   a learning rate of 0 that one, too. */
static void check_weights(int quick) {
    enum { N = 300 };
    static const char *const name[] = {"momentum", "dampening",   "Nesterov", "Adam", "AdamW",
                                       "AMSGrad",  "StableAdamW", "Adan",     "RAdam"};
    static training a, b;
    static uint16_t copy[2][N];
    static kopt_counts counts[2];
    int rule, f, moments, frozen, k;
    for (rule = 0; rule < 9; ++rule) {
        int bad = 0, paid = 0, runs = 0;
        for (f = KOPT_BF16; f <= KOPT_FP16; ++f)
            for (moments = 0; moments < 16; ++moments)
                for (frozen = 0; frozen < 2; ++frozen) {
                    kopt_optimizer o = rule < 3    ? kopt_sgd(1e-3, 0.9)
                                       : rule == 3 ? kopt_adam(1e-3)
                                       : rule == 6 ? kopt_stable_adamw(1e-3)
                                       : rule == 7 ? kopt_adan(1e-3)
                                       : rule == 8 ? kopt_radam(1e-3)
                                                   : kopt_adamw(1e-3);
                    ref_layout l;
                    float first[N];
                    fill(first, N, -1.5f, 1.5f);
                    if (moments % 4 == KOPT_FP16 || (quick && (moments + rule) % 5)) continue;
                    ++runs, o.dampening = rule == 1 ? 0.25 : 0, o.nesterov = rule == 2, o.amsgrad = rule == 5;
                    o.lr = frozen ? 0 : 1e-3, o.step = 10000;                     /* the rate of RAdam rises before */
                    start(&a, o, EIGHT, N, first), start(&b, o, EIGHT, N, first); /* for the fields of the tensors */
                    a.opt.first_moment_format = b.opt.first_moment_format = (kopt_format)(moments % 4);
                    a.opt.second_moment_format = b.opt.second_moment_format = (kopt_format)(moments / 4);
                    a.t.weight_format = b.t.weight_format = (kopt_format)f;
                    a.t.state_size = b.t.state_size = sizeof a.state, b.opt.rounding = KOPT_STOCHASTIC;
                    a.t.copy = copy[0], b.t.copy = copy[1], a.t.copy_format = b.t.copy_format = KOPT_BF16;
                    a.t.counts = &counts[0], b.t.counts = &counts[1];
                    bad += kopt_state_init(&a.opt, &a.t, 1, first) || kopt_state_init(&b.opt, &b.t, 1, first);
                    l = ref_layout_of(&a.opt, a.t.weight_format, N);
                    for (k = 0; k < 8; ++k) {
                        size_t after = ref_format(&a.opt, 0) == KOPT_Q8 ? l.scale[0] + 16 : l.moment[0];
                        after = l.moment[1] ? l.moment[1] : after;
                        memcpy(a.grad, some(), sizeof a.grad), memcpy(b.grad, a.grad, sizeof a.grad);
                        memcpy(b.weight, a.weight, sizeof a.weight), memcpy(b.state + 64, a.state + 64, l.size - 64);
                        train(&a, 1), train(&b, 1);
                        a.opt.lr *= 0.9, b.opt.lr = a.opt.lr;
                        if (k == 0 && !frozen) continue; /* no rate before */
                        bad += memcmp(a.weight, b.weight, 2 * N) != 0 || memcmp(copy[0], copy[1], sizeof copy[0]) != 0;
                        bad += memcmp(&counts[0], &counts[1], sizeof counts[0]) != 0;
                        bad += memcmp(a.state + after, b.state + after, l.size - after) != 0;
                        if (frozen)
                            bad += memcmp(a.state + 64, b.state + 64, l.size - 64) != 0;
                        else
                            paid += memcmp(a.state + l.moment[0], b.state + l.moment[0], N) != 0;
                    }
                }
        ok(!bad && paid >= (quick ? 2 : 24) * 7,
           "%s: a step has the weights of STOCHASTIC, and other first moments: %d runs, %d differ", name[rule], runs,
           bad);
    }
}

/* ---- Small updates ---------------------------------------------------------------------------------------------- */

/* AdamW on a constant gradient, with which fp32 goes the whole way: which share of it the mean weight goes, and the
   root of the mean square of what a weight is away from there, in ulps. */
static double share_of_way(kopt_optimizer o, arm a, size_t n, long steps, double *rms) {
    static training r;
    float first[MOST];
    double way = (double)(float)o.lr * (double)steps, mean = 0, sum = 0, x;
    size_t i;
    fill(first, n, 1.25f, 1.75f);
    start(&r, o, a, n, first);
    for (i = 0; i < n; ++i) r.grad[i] = i % 2 ? 1.0f : -1.0f, first[i] = weight_of(&r.t, i);
    train(&r, steps);
    for (i = 0; i < n; ++i) {
        x = ((double)first[i] - (double)weight_of(&r.t, i)) * (i % 2 ? 1 : -1);
        mean += x / way / (double)n, sum += (x - way) * (x - way);
    }
    *rms = sqrt(sum / (double)n) / ulp(1.5);
    return mean;
}

static void check_stall(int quick) {
    static const double update[] = {1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7}, noise[] = {2, 1.5, 1.5, 1.5, 1.5, 1.5};
    int a, k;
    double rms, other, share;
    for (a = EIGHT; a <= SIX; a += SIX - EIGHT)
        for (k = 0; k < (quick ? 4 : 6); ++k) {
            kopt_optimizer o = kopt_adamw(1.5 * update[k]);
            const long steps = (long)fmin(quick ? 3000 : 20000, 0.1 / o.lr);
            /* The mean of n weights, each half an ulp away or less than 2, is three standard deviations from 1. */
            const size_t n = quick ? 512 : MOST;
            const double margin = fmax(0.05, 3 * 0.6 * ulp(1.5) / sqrt((double)n) / (o.lr * (double)steps));
            o.weight_decay = 0;
            share = share_of_way(o, (arm)a, n, steps, &rms),
            share_of_way(o, a == SIX ? NOISY_SIX : NOISY, n, steps, &other);
            ok(fabs(share - 1) < margin && rms < noise[k] && (k < 1 || k > 3 || rms < other / 1.5),
               "%s, updates of %.0e of the weight: %.3f of the way, rms %.2f ulps (STOCHASTIC %.2f)", arm_name[a],
               update[k], share, rms, other);
        }
    {
        kopt_optimizer o = kopt_adamw(4.5e-8); /* less than half of the last bit of an fp32 weight in [1, 2) */
        o.weight_decay = 0;
        share = quick ? 1 : share_of_way(o, EIGHT, 1024, 200000, &rms);
        ok(fabs(share - 1) < 0.1, "updates that binary32 loses: %.3f of the way", share);
    }
}

/* ---- Decay ------------------------------------------------------------------------------------------------------ */

static void check_decay(int quick) {
    int a;
    const size_t n = quick ? 256 : MOST;
    for (a = EIGHT; a <= SIX; ++a) {
        static training r;
        float first[MOST];
        double mean = 0, sum = 0, x;
        size_t i;
        kopt_optimizer o = kopt_adamw(1e-4);
        o.weight_decay = 0.1;
        fill(first, n, 1.3f, 1.9f);
        start(&r, o, (arm)a, n, first);
        for (i = 0; i < n; ++i) first[i] = weight_of(&r.t, i), r.grad[i] = 0;
        train(&r, 10000);
        for (i = 0; i < n; ++i) {
            x = (double)weight_of(&r.t, i), mean += x / (double)first[i] / (double)n;
            x = (x - 0.904837 * (double)first[i]) / ulp(1.5), sum += x * x;
        }
        ok(fabs(mean - 0.90484) < (quick ? 0.0009 : 0.0003) && sqrt(sum / (double)n) < (a == SIX ? 1.5 : 1),
           "decay alone, 10,000 times 1e-5, %s: mean factor %.5f (0.90484), rms %.2f ulps", arm_name[a], mean,
           sqrt(sum / (double)n));
    }
}

/* ---- A learning rate that rises --------------------------------------------------------------------------------- */

/* Two tensors, whose states are blocks or, in arrays of the caller, the same bytes. */
enum { LONG = 512, BLOCK = KOPT_STATE_BYTES(LONG, 16) };
typedef struct model {
    kopt_optimizer opt;
    kopt_tensor t[2];
    kopt_state_arrays arrays[2];
    float grad[2][LONG];
    union {
        unsigned char bytes[2][BLOCK];
        uint32_t aligned;
    } state;
    unsigned char weight[2][4 * LONG];
} model;

static void make_model(model *m, kopt_optimizer o, arm a, int arrays, const float *weights) {
    int i, k;
    memset(m, 0, sizeof *m);
    m->opt = with_arm(o, a);
    for (i = 0; i < 2; ++i) {
        kopt_tensor *t = &m->t[i];
        ref_layout l;
        *t = kopt_tensor_of(m->weight[i], a == FP32 ? KOPT_F32 : KOPT_BF16, m->grad[i], KOPT_F32, LONG,
                            m->state.bytes[i], BLOCK);
        t->id = (uint32_t)i + 1;
        l = ref_layout_of(&m->opt, t->weight_format, LONG);
        must(l.size <= BLOCK, "BLOCK");
        if (!arrays) continue;
        t->arrays = &m->arrays[i], t->state = NULL, t->state_size = 0, m->arrays[i].size = sizeof m->arrays[i];
        for (k = 0; k < ref_moments(&m->opt); ++k) {
            m->arrays[i].moment[k] = m->state.bytes[i] + l.moment[k];
            if (ref_format(&m->opt, k) == KOPT_Q8) m->arrays[i].scale[k] = m->state.bytes[i] + l.scale[k];
        }
        m->arrays[i].rates = m->state.bytes[i] + 32;
    }
    must(kopt_state_init(&m->opt, m->t, 2, weights) == KOPT_OK, "kopt_state_init");
}

static int models_differ(const model *a, const model *b) {
    const size_t size = ref_layout_of(&a->opt, a->t[0].weight_format, LONG).size;
    int i, bad = memcmp(a->weight, b->weight, sizeof a->weight) != 0;
    for (i = 0; i < 2; ++i) {
        bad += memcmp(a->state.bytes[i] + 32, b->state.bytes[i] + 32, 16) != 0;
        bad += memcmp(a->state.bytes[i] + 64, b->state.bytes[i] + 64, size - 64) != 0;
    }
    return bad;
}

/* Only the first `count` tensors. The gradients are the same whenever the step is. */
static void model_step(model *m, double lr, size_t count) {
    int i;
    for (i = 0; i < 2; ++i) {
        uint32_t at = m->opt.step * 2 + (uint32_t)i;
        memcpy(m->grad[i], pool + scaled_to(mixed32(&at), POOL), sizeof m->grad[i]);
    }
    m->opt.lr = lr;
    must(kopt_optimizer_step(&m->opt, m->t, count) == KOPT_OK, "kopt_optimizer_step");
}

/* A checkpoint, and the model that it makes in other memory. */
static void reload(model *m, kopt_optimizer o, arm a, int arrays) {
    static unsigned char image[2 * BLOCK + 16 * LONG + 1000];
    static model other;
    const size_t size = kopt_save_size(&m->opt, m->t, 2);
    int i;
    must(size > 0 && size <= sizeof image, "kopt_save_size");
    must(kopt_save(&m->opt, m->t, 2, image, size) == KOPT_OK, "kopt_save");
    make_model(&other, o, a, arrays, NULL);
    if (arrays) memset(other.state.bytes, 0, sizeof other.state.bytes);
    other.state.bytes[0][35] = other.state.bytes[1][39] = 1; /* what was there before does not matter */
    must(kopt_load(&other.opt, other.t, 2, image, size) == KOPT_OK, "kopt_load");
    for (i = 0; i < 2; ++i)
        must(!memcmp(other.state.bytes[i] + 32, m->state.bytes[i] + 32, 16), "a load brings the places back");
    memcpy(m->weight, other.weight, sizeof m->weight);
    memcpy(m->state.bytes, other.state.bytes, sizeof m->state.bytes);
    m->opt = other.opt;
}

typedef enum manner { BLOCKS, OWN_ARRAYS, LOADED, LOADED_ARRAYS, LEFT_OUT } manner;

/* Steps at 1e-6, then a learning rate that rises by a factor with each step to 1e-3, and 20 steps there: the longest
   way from where the rise began that a weight of the second tensor goes. That one is LEFT_OUT of the rise. */
static double way(arm a, double factor, manner how, int steps, model *m) {
    const int arrays = how == OWN_ARRAYS || how == LOADED_ARRAYS;
    float first[2 * LONG], from[LONG];
    kopt_optimizer o = kopt_adamw(1e-6);
    double lr = 1e-6, worst = 0;
    int k;
    size_t i;
    for (i = 0; i < 2 * LONG; ++i) first[i] = 0.1f;
    o.weight_decay = 0;
    make_model(m, o, a, arrays, first);
    for (k = 0; k < steps; ++k) model_step(m, lr, 2);
    if (how == LOADED || how == LOADED_ARRAYS) reload(m, o, a, arrays);
    for (i = 0; i < LONG; ++i) from[i] = weight_of(&m->t[1], i);
    for (k = 0; k < 20; k += lr >= 1e-3) {
        const int late = lr >= 1e-3;
        lr = fmin(1e-3, lr * factor);
        model_step(m, lr, how == LEFT_OUT && !late ? 1 : 2);
        for (i = 0; i < LONG; ++i) worst = fmax(worst, fabs((double)weight_of(&m->t[1], i) - (double)from[i]));
    }
    return worst;
}

static void check_rise(int quick) {
    static const double factor[] = {1000, 2, 1.5, 1.25};
    static model blocks, m;
    const int steps = quick ? 300 : 2000;
    int a, k, how;
    for (a = EIGHT; a <= SIX; a += SIX - EIGHT)
        for (k = 0; k < 4; ++k) {
            const double fp32 = way(FP32, factor[k], BLOCKS, steps, &m),
                         out = way(FP32, factor[k], LEFT_OUT, steps, &m);
            const double x = way((arm)a, factor[k], BLOCKS, steps, &blocks);
            const double y = way((arm)a, factor[k], LEFT_OUT, steps, &m);
            int differ = 0;
            for (how = OWN_ARRAYS; how < LEFT_OUT; ++how)
                way((arm)a, factor[k], (manner)how, steps, &m), differ += models_differ(&blocks, &m);
            ok(x <= 1.5 * fp32 && y <= 1.5 * out,
               "%s, the rate times %g a step from 1e-6 to 1e-3: a way of %.4f (fp32 %.4f), left out of it %.4f (fp32 "
               "%.4f)",
               arm_name[a], factor[k], x, fp32, y, out);
            ok(!differ, "... the same in arrays, and loaded from a checkpoint before: %d differ", differ);
        }
}

/* Steps in parts, in any order, while the rate rises and falls: a part does not see what another one of its step has
   written. A rate of 0, and steps of the first part alone, which holds element 0 of both. */
static void check_parts(void) {
    static const size_t cut[] = {0, 256, LONG, LONG + 256, 2 * LONG};
    static const int order[][4] = {{0, 1, 2, 3}, {3, 2, 1, 0}, {1, 0, 3, 2}, {2, 3, 0, 1}};
    static const double rate[] = {1e-5, 1e-3, 2e-3, 0, 1e-3, 4e-3, 1e-4, 1.1e-4, 0, 0, 5e-3};
    static model whole, parts;
    float first[2 * LONG];
    int a, i, k, p, bad = 0, runs = 0;
    fill(first, 2 * LONG, -1, 1);
    for (a = EIGHT; a <= SIX; ++a)
        for (i = 0; i < 4; ++i) {
            kopt_optimizer o = kopt_adamw(1e-3);
            make_model(&whole, o, (arm)a, 0, first), make_model(&parts, o, (arm)a, i % 2, first);
            for (k = 0; k < 11; ++k, ++runs) {
                kopt_step step;
                model_step(&whole, rate[k], 2);
                parts.opt.lr = rate[k], memcpy(parts.grad, whole.grad, sizeof whole.grad);
                bad += kopt_step_begin(&step, &parts.opt) != KOPT_OK;
                for (p = 0; p < 4; ++p)
                    bad += kopt_step_range(&step, parts.t, 2, cut[order[i][p]], cut[order[i][p] + 1]) != KOPT_OK;
                bad += models_differ(&whole, &parts);
            }
        }
    ok(!bad, "steps in parts, in four orders: %d steps, %d differ from the whole", runs, bad);
}

/* The places themselves: what a run writes there, and that it writes nothing where the rate is 0. */
static void check_places(void) {
    static const double rate[] = {1e-3, 2e-3, 0, 5e-4};
    static model m;
    const unsigned char *const p = m.state.bytes[1] + 32;
    kopt_optimizer o = kopt_sgd(1e-3, 0.9);
    kopt_state_arrays found;
    float first[2 * LONG];
    uint32_t before[4], now[4];
    int k, i, bad = 0;
    fill(first, 2 * LONG, -1, 1);
    for (i = 0; i < 2; ++i) {
        make_model(&m, o, EIGHT, i, first);
        m.t[1].rate_scale = 0.5;
        bad += kopt_state_arrays_of(&m.opt, &m.t[1], &found) != KOPT_OK || (unsigned char *)found.rates != p;
        for (k = 0; k < 4; ++k) {
            int place, same = 0;
            memcpy(before, p, 16);
            if (k == 0) bad += (before[0] | before[1] | before[2] | before[3]) != 0;
            model_step(&m, rate[k], 2);
            memcpy(now, p, 16);
            for (place = 0; place < 4; place += 2) {
                const int wrote = now[place] == m.opt.step && now[place + 1] == ref_bits(ref_mul((float)rate[k], 0.5f));
                same += now[place] == before[place] && now[place + 1] == before[place + 1];
                bad += !wrote && (now[place] != before[place] || now[place + 1] != before[place + 1]);
            }
            bad += same != (rate[k] > 0 ? 1 : 2);
        }
    }
    ok(!bad, "each step writes its number and rate beside those of the step before; one without a rate writes nothing");
}

/* A learning rate of -0 is one of 0: from the first step on, and after another one. */
static void check_minus_zero(void) {
    static const double rate[] = {0, 1e-3, 0, 2e-3};
    static model m[2];
    float weights[2 * LONG];
    int k, i, bad = 0;
    fill(weights, 2 * LONG, -1, 1);
    for (i = 0; i < 2; ++i) make_model(&m[i], kopt_sgd(1e-3, 0.9), EIGHT, 0, weights);
    for (k = 0; k < 4; ++k) {
        for (i = 0; i < 2; ++i) model_step(&m[i], i && !(rate[k] > 0) ? -0.0 : rate[k], 2);
        bad += models_differ(&m[0], &m[1]);
    }
    ok(!bad, "a learning rate of -0 is one of 0");
}

/* The places have steps 2 and 4, and step 2 is made again: as if they were empty. */
static void check_step_back(void) {
    static const double rate[] = {1e-3, 2e-3, 0, 5e-4};
    static model first, again;
    float weights[2 * LONG];
    model *const both[] = {&first, &again};
    uint32_t number[2];
    int k, i;
    fill(weights, 2 * LONG, -1, 1);
    for (i = 0; i < 2; ++i) {
        unsigned char *const p = both[i]->state.bytes[0] + 32;
        make_model(both[i], kopt_sgd(1e-3, 0.9), EIGHT, 0, weights);
        for (k = 0; k < 4; ++k) model_step(both[i], rate[k], 1);
        memcpy(&number[0], p, 4), memcpy(&number[1], p + 8, 4);
        must(number[0] == 2 && number[1] == 4, "the steps in the places");
        if (i) memset(p, 0, 16);
        both[i]->opt.step = 1;
        model_step(both[i], 1e-3, 1);
        memset(p, 0, 16);
    }
    ok(!models_differ(&first, &again), "a step made again takes no rate of the same step or a later one");
}

/* ---- Whole trainings -------------------------------------------------------------------------------------------- */

enum { D = 32, BATCH = 8 };
typedef enum task { LINEAR, RESTARTS, LOGISTIC } task;

/* Nearly normal, and cheap. */
static float input(uint64_t *seed) {
    const uint64_t u = splitmix64(seed);
    const int sum = (int)(u & 0xffff) + (int)(u >> 16 & 0xffff) + (int)(u >> 32 & 0xffff) + (int)(u >> 48);
    return (float)(sum - 131070) * (1.7320508f / 65536);
}

/* A regression of D weights about a normal truth, the same data for all arms. What the weights of each arm lose in
   expectation: at the end, against the truth; of LOGISTIC, at a constant rate, on average over the second half, against
   the weights of fp32. apart: how far from those any weight was at any step. */
static void regress(task what, const kopt_optimizer *o, uint64_t seed, int steps, double loss[ARMS],
                    double apart[ARMS]) {
    enum { PROBES = 200 };
    static training r[ARMS];
    static float probe[PROBES][D];
    double truth[D], w[ARMS][D], z, p, q;
    float zero[D] = {0};
    int a, i, k, b, times = 0;
    for (i = 0; i < D; ++i) truth[i] = normal64(&seed) * (what == LOGISTIC ? 0.5 : 1);
    for (b = 0; b < PROBES; ++b)
        for (i = 0; i < D; ++i) probe[b][i] = input(&seed);
    for (a = 0; a < ARMS; ++a) start(&r[a], *o, (arm)a, D, zero), r[a].opt.seed = seed, loss[a] = apart[a] = 0;
    for (k = 0; k < steps; ++k) {
        const double turn = what == RESTARTS ? fmod(4.0 * k / steps, 1) : (double)k / steps;
        const double lr = what == LOGISTIC ? o->lr : o->lr * 0.5 * (1 + cos(3.14159265358979 * turn));
        for (a = 0; a < ARMS; ++a) {
            r[a].opt.lr = lr, memset(r[a].grad, 0, sizeof zero);
            for (i = 0; i < D; ++i) w[a][i] = (double)weight_of(&r[a].t, (size_t)i);
        }
        for (b = 0; b < BATCH; ++b) {
            float x[D];
            const double error = normal64(&seed);
            double target = 0;
            for (i = 0; i < D; ++i) x[i] = input(&seed), target += truth[i] * (double)x[i];
            if (what == LOGISTIC) target = uniform64(&seed) < 1 / (1 + exp(-target));
            for (a = 0; a < ARMS; ++a) {
                for (z = 0, i = 0; i < D; ++i) z += w[a][i] * (double)x[i];
                z = what == LOGISTIC ? 1 / (1 + exp(-z)) - target : z - target + error;
                for (i = 0; i < D; ++i) r[a].grad[i] += (float)(z / BATCH) * x[i];
            }
        }
        for (a = 0; a < ARMS; ++a) {
            train(&r[a], 1);
            for (i = 0; i < D; ++i)
                apart[a] =
                    fmax(apart[a], fabs((double)weight_of(&r[a].t, (size_t)i) - (double)weight_of(&r[0].t, (size_t)i)));
        }
        if (k + 1 < steps && (what != LOGISTIC || k < steps / 2 || k % 50)) continue;
        for (++times, a = 0; a < ARMS; ++a) {
            for (i = 0; i < D && what != LOGISTIC; ++i) {
                z = (double)weight_of(&r[a].t, (size_t)i) - truth[i];
                loss[a] += 0.5 * z * z;
            }
            for (b = 0; b < PROBES && what == LOGISTIC; ++b) {
                for (p = q = 0, i = 0; i < D; ++i)
                    p += (double)weight_of(&r[FP32].t, (size_t)i) * (double)probe[b][i],
                        q += (double)weight_of(&r[a].t, (size_t)i) * (double)probe[b][i];
                p = 1 / (1 + exp(-p)), q = 1 / (1 + exp(-q));
                loss[a] += (p * log(p / q) + (1 - p) * log((1 - p) / (1 - q))) / PROBES;
            }
        }
    }
    for (a = 0; a < ARMS; ++a) loss[a] /= times;
}

static void check_training(task what, const kopt_optimizer *o, int seeds, int steps, const double most[ARMS],
                           double least) {
    static const char *const name[] = {"linear regression", "four restarts of a cosine", "logistic regression"};
    double sum[ARMS] = {0}, far[ARMS] = {0};
    int s, a;
    for (s = 0; s < seeds; ++s) {
        double loss[ARMS], apart[ARMS];
        regress(what, o, 100 + (uint64_t)s, steps, loss, apart);
        for (a = 0; a < ARMS; ++a) sum[a] += (loss[a] - loss[FP32]) / seeds, far[a] = fmax(far[a], apart[a]);
    }
    for (a = WIDE; a <= SIX; ++a)
        ok(fabs(sum[a]) < most[a] && (what != RESTARTS || far[a] < 0.1),
           "%s, %s: %.2e worse than fp32, at most %.3f away from its weights", name[what], arm_name[a], sum[a], far[a]);
    ok(sum[NOISY] > least && sum[NOISY_SIX] > least, "... STOCHASTIC: %.2e, with 8-bit moments %.2e", sum[NOISY],
       sum[NOISY_SIX]);
}

/* ---- The first moment ------------------------------------------------------------------------------------------- */

/* What is owed stays in proportion to ulp / rate. */
static void check_size(int quick) {
    enum { N = 64 };
    static training r;
    static const double rate[] = {1e-3, 1e-5, 1e-7};
    float first[N], m[N], v[N];
    int k, s;
    size_t i;
    fill(first, N, 1.3f, 1.7f);
    for (k = 0; k < 3; ++k) {
        kopt_optimizer o = kopt_adamw(rate[k]);
        double worst = 0;
        o.weight_decay = 0;
        start(&r, o, EIGHT, N, first);
        for (s = 0; s < (quick ? 4000 : 200000); ++s) {
            r.t.grad = some();
            train(&r, 1);
            if (s < 2000 || s % 8) continue;
            must(kopt_state_read(&r.opt, &r.t, (kopt_slot)1, m) == KOPT_OK, "kopt_state_read");
            must(kopt_state_read(&r.opt, &r.t, (kopt_slot)2, v) == KOPT_OK, "kopt_state_read");
            for (i = 0; i < N; ++i) worst = fmax(worst, fabs((double)m[i]) / (sqrt((double)v[i]) + 1e-8));
        }
        ok(worst < 0.15 * ulp(1.5) / rate[k] + 5 && worst > 0.05 * ulp(1.5) / rate[k],
           "rate %.0e: the largest first moment is %.4g of the root of the second one", rate[k], worst);
    }
}

/* ---- What is refused -------------------------------------------------------------------------------------------- */

static void check_refused(void) {
    static training r;
    float first[16];
    int k, bad = 0, cases = 0;
    fill(first, 16, -1, 1);
    for (k = 0; k < 21; ++k) {
        kopt_optimizer o = k == 0   ? kopt_lion(1e-3)
                           : k == 1 ? kopt_ranger(1e-3)
                           : k == 2 ? kopt_ema(0.9)
                           : k == 3 ? kopt_sgd(1e-3, 0)
                           : k < 7  ? kopt_sgd(1e-3, k == 4   ? 0.9991
                                                     : k == 5 ? 0.999
                                                              : 1e-3)
                           : k < 10 ? kopt_adan(1e-3)
                                    : kopt_adamw(1e-3);
        int good = k == 5 || k == 6 || k == 9 || k == 10 || k == 13 || k == 16;
        kopt_result result;
        const char *words;
        o = with_arm(o, EIGHT);
        if (k == 7 || k == 11) o.beta1 = 0;
        if (k == 8 || k == 12) o.beta1 = 0.9995;
        if (k == 13) o.beta1 = 0.999;
        if (k >= 14 && k < 18)
            o.first_moment_format = (kopt_format)(k == 16   ? KOPT_F32
                                                  : k == 14 ? KOPT_BF16
                                                  : k == 15 ? KOPT_FP16
                                                            : KOPT_Q8),
            o.moment_rounding = KOPT_NEAREST;
        if (k == 18) o.rounding = (kopt_rounding)(KOPT_FEEDBACK + 1);
        if (k == 19) o.beta1 = 1e-4, good = 1;
        if (k == 20) o.first_moment_format = KOPT_FP16;
        r.t = kopt_tensor_of(r.weight, KOPT_BF16, r.grad, KOPT_F32, 16, r.state, sizeof r.state);
        memset(r.state, 0xa5, sizeof r.state);
        result = kopt_state_init(&o, &r.t, 1, first);
        words = kopt_explain(&o, &r.t, 1);
        ++cases;
        if (good ? result != KOPT_OK || kopt_optimizer_step(&o, &r.t, 1) != KOPT_OK
                 : result != KOPT_ERROR_OPTION || r.state[0] != 0xa5 || kopt_state_size(&o, &r.t) != 0 ||
                       strstr(words, k == 18 ? "rounding" : "FEEDBACK") == NULL)
            note("case %d: %s, %s", k, kopt_result_string(result), words), ++bad;
    }
    ok(!bad,
       "rules without a first moment that can pay, no or too much momentum, moments to nearest or fp16: %d cases, %d "
       "wrong",
       cases, bad);
    {
        static training fresh;
        kopt_optimizer o = kopt_adamw(1e-3);
        start(&r, o, EIGHT, 16, first);
        fresh = r;
        ok(kopt_state_dither(&r.opt, &r.t, 1) == KOPT_OK && !memcmp(r.state, fresh.state, sizeof r.state) &&
               !memcmp(r.weight, fresh.weight, sizeof r.weight),
           "kopt_state_dither() has nothing to draw");
    }
    { /* fp32 weights are stored as they are, and owe nothing */
        static training a, b;
        kopt_optimizer o = kopt_adamw(1e-3);
        int differ = 0;
        start(&a, o, FP32, 16, first), start(&b, o, FP32, 16, first);
        b.opt.rounding = KOPT_NEAREST;
        differ += kopt_state_init(&b.opt, &b.t, 1, first) != KOPT_OK;
        for (k = 0; k < 5; ++k) {
            memcpy(a.grad, some(), sizeof a.grad), memcpy(b.grad, a.grad, sizeof a.grad);
            a.opt.lr = b.opt.lr = k % 2 ? 1e-2 : 1e-3;
            train(&a, 1), train(&b, 1);
        }
        ok(!differ && !memcmp(a.weight, b.weight, 64) && !memcmp(a.state + 64, b.state + 64, 128),
           "fp32 weights: the steps of NEAREST");
    }
}

int main(int count, char **arguments) {
    const int quick = count > 1 && !strcmp(arguments[1], "quick");
    const double linear[ARMS] = {0, 3e-4, 3e-4, 3e-4, 4e-4, 0, 0}, restarts[ARMS] = {0, 7e-4, 7e-4, 7e-4, 7e-4, 0, 0},
                 logistic[ARMS] = {0, 1e-5, 1e-5, 4e-5, 8e-5, 0, 0};
    kopt_optimizer adam = kopt_adamw(3e-3), slow = kopt_adamw(1e-4);
    size_t i;
    adam.weight_decay = slow.weight_decay = 0;
    for (i = 0; i < POOL + MOST; ++i) pool[i] = normal32(&draws);
    check_conservation(quick);
    check_weights(quick);
    check_stall(quick);
    check_decay(quick);
    check_rise(quick);
    check_parts();
    check_places();
    check_minus_zero();
    check_step_back();
    if (!quick) check_training(LINEAR, &adam, 6, 12000, linear, 15e-4);
    check_training(RESTARTS, &adam, quick ? 1 : 2, 8000, restarts, 8e-4);
    if (!quick) check_training(LOGISTIC, &slow, 3, 60000, logistic, 16e-5);
    check_size(quick);
    check_refused();
    return done();
}
