/* compress.c - data-parallel training with compressed gradients: what goes from worker to worker has 32, 16, 8 or 1 bit
   per number. The model, the text and the order of the batches are those of demo.c, which it includes.

       cc -O3 -o compress docs/examples/compress.c -lm && ./compress [FILE]

   Two workers see a batch each and compress its gradients. What both have sent is decoded and added in a fixed order,
   and one step of SGD takes the mean: with real workers all of them do so, and get the same bits. The arms:

       fp32              gradients as they are
       bf16, 8 bit,      rounded to nearest, with error feedback: the residual that the code loses is added
       1 bit               to the next gradient
       8 bit random      rounded stochastically, no residual: unbiased
       1 bit biased      the signs with the mean magnitude, no residual

   Exit status: 0 if those with error feedback, and the unbiased one of 8 bits, end within CLOSE_TO nats per byte of
   fp32, and the biased one at least APART above it; 1 if not. */
int demo_main(int argc, char **argv);
#define main demo_main
#include "demo.c"
#undef main

enum { WORKERS = 2, ROUNDS = 2000, BUFFER = 4 * HIDDEN * VOCAB };
static const double RATE = 0.5, CLOSE_TO = 0.02, APART = 0.20;

typedef struct {
    const char *name;
    kopt_format code; /* KOPT_F32: none */
    kopt_rounding rounding;
    int feedback;
} Channel;

static const Channel channels[] = {
    {"fp32", KOPT_F32, KOPT_NEAREST, 0},           {"bf16", KOPT_BF16, KOPT_NEAREST, 1},
    {"8 bit", KOPT_Q8, KOPT_NEAREST, 1},           {"1 bit", KOPT_Q1, KOPT_NEAREST, 1},
    {"8 bit random", KOPT_Q8, KOPT_STOCHASTIC, 0}, {"1 bit biased", KOPT_Q1, KOPT_NEAREST, 0}};
enum { CHANNELS = sizeof channels / sizeof *channels };

/* Returns the loss on the held-out bytes; *bytes is what a worker sends in one step. */
static double train_compressed(const Channel *channel, const Data *d, size_t *bytes) {
    static unsigned char wire[BUFFER];
    kopt_optimizer opt = kopt_sgd(RATE, 0);
    kopt_tensor tensors[PARAMETERS];
    kopt_compressor packer[WORKERS][PARAMETERS];
    float *mean[PARAMETERS];
    uint64_t random = SEED;
    Model m;
    model_make(&m, KOPT_F32);
    for (int p = 0; p < PARAMETERS; p++) {
        const size_t n = parameter_size(p);
        mean[p] = allocate(n * sizeof(float));
        parameter_init(m.weight[p].value, p, &random);
        tensors[p] = KOPT_TENSOR(KOPT_F32, m.weight[p].value, mean[p], n, NULL, 0); /* SGD of fp32 keeps no state */
        for (int w = 0; w < WORKERS; w++) {
            void *residual = channel->feedback ? allocate(n * sizeof(kopt_bf16)) : NULL;
            packer[w][p] = kopt_compressor_of(channel->code, residual, n);
            packer[w][p].rounding = channel->rounding;
            packer[w][p].id = (uint32_t)(p + PARAMETERS * w);
        }
    }
    check(kopt_list_set_ids(tensors, PARAMETERS, 0));
    for (int step = 0; step < ROUNDS; step++) {
        *bytes = 0;
        for (int p = 0; p < PARAMETERS; p++) memset(mean[p], 0, m.grad[p].n * sizeof(float));
        for (int w = 0; w < WORKERS; w++) {
            for (size_t b = 0; b < BATCH; b++) model_set_row(&m, b, d, data_sample(d, &random));
            model_forward(&m);
            cross_entropy(&m, BATCH, &m.dlogits, 1);
            model_backward(&m);
            for (int p = 0; p < PARAMETERS; p++) {
                const size_t n = m.grad[p].n;
                if (channel->code == KOPT_F32) {
                    const void *shards[2] = {mean[p], m.grad[p].value};
                    if (w == 0) *bytes += n * sizeof(float);
                    check(kopt_reduce(mean[p], KOPT_F32, shards, 2, KOPT_F32, n, 1));
                    continue;
                }
                check(kopt_compress(&packer[w][p], wire, sizeof wire, m.grad[p].value, KOPT_F32));
                if (w == 0) *bytes += kopt_format_size(channel->code, n);
                check(kopt_decompress_add(mean[p], KOPT_F32, wire, sizeof wire, channel->code, n, 1));
            }
        }
        opt.grad_scale = 1.0 / WORKERS;
        opt.lr = kopt_cosine_lr((uint32_t)step, 0, ROUNDS + 1, RATE, 0);
        check(kopt_optimizer_step(&opt, tensors, PARAMETERS));
    }
    double loss = model_validate(&m, d);
    for (int p = 0; p < PARAMETERS; p++) {
        for (int w = 0; w < WORKERS; w++) free(packer[w][p].residual);
        free(mean[p]);
    }
    model_free(&m);
    return loss;
}

int main(int argc, char **argv) {
    Data data = data_load(argc > 1 ? argv[1] : "kahan_opt.h");
    double loss[CHANNELS];
    int good = 1;
    printf("%d workers, %d steps of SGD\n\n", WORKERS, ROUNDS);
    puts("arm            error feedback   bytes per worker and step   validation loss   minus fp32   seconds");
    for (int i = 0; i < CHANNELS; i++) {
        const Channel *channel = &channels[i];
        const double start = wall_clock();
        size_t bytes;
        loss[i] = train_compressed(channel, &data, &bytes);
        const double above = loss[i] - loss[0];
        const int biased = channel->code == KOPT_Q1 && !channel->feedback;
        printf("%-12s   %14s   %25zu   %15.4f   %+10.4f   %7.1f\n", channel->name, channel->feedback ? "yes" : "no",
               bytes, loss[i], above, wall_clock() - start);
        fflush(stdout);
        good &= biased ? !(above < APART) : above < CLOSE_TO;
    }
    printf("\n%s: with error feedback or unbiased within %.2f of fp32, biased at least %.2f above\n",
           good ? "PASS" : "FAIL", CLOSE_TO, APART);
    free(data.bytes);
    free(data.val);
    return !good;
}
