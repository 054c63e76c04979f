/* zero1_whole.c - what docs/examples/zero1.c has to compute, in one process without MPI: whole tensors, all gradients
   of a batch side by side, one kopt_reduce(), one kopt_optimizer_step(). It has the model of that file, and nothing
   else.

       zero1_whole BATCHES FORMAT SMALL CODE [FILE]

   trains for so many batches and prints the hash of the weights; with FILE, fails unless this checkpoint holds the same
   weights, residuals and moments, bit for bit. FORMAT: bf16, fp16; SMALL: 0, 1; CODE: none, q8, sign, bf16. */
#define ZERO1_MODEL_ONLY
#include "../../docs/examples/zero1.c"

enum { MOST = (HIDDEN + 1) * HIDDEN };
static uint16_t *weight[LAYERS];
static void *state[LAYERS];
static uint16_t grad[MICRO_BATCHES][LAYERS][MOST], residual[MICRO_BATCHES][LAYERS][MOST];
static float decoded[MICRO_BATCHES][LAYERS][MOST], sum[LAYERS][MOST];
static kopt_compressor compressor[MICRO_BATCHES][LAYERS];
static uint64_t batch;

static void stop(const char *what) {
    fprintf(stderr, "zero1_whole: %s\n", what);
    exit(1);
}
static void check(kopt_result result, const char *what) {
    if (result != KOPT_OK) fprintf(stderr, "%s\n", kopt_result_string(result)), stop(what);
}

static int evaluate(void *user, double loss_scale) {
    static unsigned char bytes[2 * MOST];
    (void)user;
    for (int m = 0; m < MICRO_BATCHES; ++m) {
        forward(weight, batch * MICRO_BATCHES + (uint64_t)m, (float)loss_scale);
        for (int k = LAYERS; k-- > 0;) backward(k, weight[k], grad[m][k]);
    }
    for (int k = 0; k < LAYERS; ++k) {
        const void *all[MICRO_BATCHES];
        const size_t n = tensor_size(k);
        for (int m = 0; m < MICRO_BATCHES; ++m) {
            all[m] = grad[m][k];
            if (code == format) continue;
            all[m] = decoded[m][k];
            memset(decoded[m][k], 0, n * sizeof(float));
            check(kopt_compress(&compressor[m][k], bytes, sizeof bytes, grad[m][k], format), "kopt_compress");
            check(kopt_decompress_add(decoded[m][k], KOPT_F32, bytes, sizeof bytes, code, n, 1), "kopt_decompress_add");
        }
        check(kopt_reduce(sum[k], KOPT_F32, all, MICRO_BATCHES, code == format ? format : KOPT_F32, n, 1),
              "kopt_reduce");
    }
    return 0;
}

/* The bytes of the image of t, which begins at *place of the file. */
static void *image(FILE *file, const kopt_optimizer *opt, const kopt_tensor *t, long *place) {
    const size_t size = kopt_save_size(opt, t, 1);
    void *bytes = malloc(size);
    if (bytes == NULL || fseek(file, *place, SEEK_SET) != 0 || fread(bytes, 1, size, file) != size)
        stop("the file is too short");
    *place += (long)size;
    return bytes;
}

static void compare(const kopt_optimizer *opt, const kopt_tensor *whole, FILE *file, long *place) {
    static unsigned char state_of_chunk[16 * CHUNK];
    static float of_whole[MOST], of_chunk[CHUNK];
    uint16_t weight_of_chunk[CHUNK];
    for (size_t first = 0; first < whole->n; first += CHUNK) {
        kopt_optimizer loaded = *opt;
        kopt_tensor t = *whole;
        t.first_index = first;
        t.n = whole->n - first < CHUNK ? whole->n - first : CHUNK;
        t.weight = weight_of_chunk, t.state = state_of_chunk, t.state_size = sizeof state_of_chunk;
        void *bytes = image(file, opt, &t, place);
        check(kopt_load(&loaded, &t, 1, bytes, kopt_save_size(opt, &t, 1)), "kopt_load");
        free(bytes);
        if (loaded.step != opt->step || loaded.seed != opt->seed) stop("a chunk of another step");
        if (memcmp(t.weight, (uint16_t *)whole->weight + first, t.n * sizeof(uint16_t)) != 0) stop("other weights");
        if (whole->state == NULL) continue; /* the residual of a compressor */
        for (int slot = KOPT_SLOT_WEIGHT; slot <= KOPT_SLOT_SECOND_MOMENT; ++slot) {
            check(kopt_state_read(opt, whole, (kopt_slot)slot, of_whole), "kopt_state_read");
            check(kopt_state_read(opt, &t, (kopt_slot)slot, of_chunk), "kopt_state_read");
            if (memcmp(of_chunk, of_whole + first, t.n * sizeof(float)) != 0) stop("another residual or moment");
        }
    }
}

int main(int argc, char **argv) {
    static float initial[LAYERS * MOST];
    float *next = initial;
    kopt_tensor t[LAYERS];
    kopt_closure closure = {evaluate, NULL, NULL};
    uint64_t hash = UINT64_C(14695981039346656037);
    unsigned skips = 0;
    if (argc < 5) stop("usage: zero1_whole BATCHES bf16|fp16 0|1 none|q8|sign|bf16 [FILE]");
    const uint64_t batches = strtoul(argv[1], NULL, 10);
    fp16 = strcmp(argv[2], "fp16") == 0, small = atoi(argv[3]);
    format = fp16 ? KOPT_FP16 : KOPT_BF16;
    code = strcmp(argv[4], "q8") == 0     ? KOPT_Q8
           : strcmp(argv[4], "sign") == 0 ? KOPT_Q1
           : strcmp(argv[4], "bf16") == 0 ? KOPT_BF16
                                          : format;
    kopt_optimizer opt = make_optimizer();
    kopt_scaler scaler = make_scaler();
    for (int k = 0; k < LAYERS; ++k) {
        const size_t n = tensor_size(k);
        if (n > MOST) stop("MOST is too small");
        weight[k] = calloc(n, sizeof *weight[k]);
        t[k] = kopt_tensor_of(weight[k], format, sum[k], KOPT_F32, n, NULL, 0);
        t[k].state_size = kopt_state_size(&opt, &t[k]);
        t[k].state = state[k] = calloc(t[k].state_size, 1);
        if (weight[k] == NULL || state[k] == NULL) stop("no memory");
        for (size_t i = 0; i < n; ++i) *next++ = initial_weight(k, i);
        for (int m = 0; m < MICRO_BATCHES; ++m) {
            compressor[m][k] = kopt_compressor_of(code, residual[m][k], n);
            compressor[m][k].seed = SEED, compressor[m][k].id = (uint32_t)(m * LAYERS + k);
        }
    }
    check(kopt_list_set_ids(t, LAYERS, 0), "kopt_list_set_ids");
    check(kopt_state_init(&opt, t, LAYERS, initial), "kopt_state_init");
    for (; batch < batches; ++batch) {
        int skipped = 0;
        if (fp16) {
            check(kopt_scaler_step(&scaler, &opt, t, LAYERS, MAX_NORM, &closure, &skipped), "kopt_scaler_step");
        } else {
            kopt_norm norm = {0};
            evaluate(NULL, 1);
            check(kopt_norm_add_grads(&norm, t, LAYERS), "kopt_norm_add_grads");
            opt.clip = kopt_norm_clip(&norm, MAX_NORM, opt.grad_scale);
            check(kopt_optimizer_step(&opt, t, LAYERS), "kopt_optimizer_step");
            opt.clip = 1;
        }
        skips += (unsigned)skipped;
    }
    for (int k = 0; k < LAYERS; ++k)
        for (size_t i = 0; i < 2 * tensor_size(k); ++i)
            hash = (hash ^ ((unsigned char *)weight[k])[i]) * UINT64_C(1099511628211);
    printf("%u steps, %u skipped; weights %016" PRIx64 "\n", (unsigned)opt.step, skips, hash);
    if (argc > 5) {
        FILE *file = fopen(argv[5], "rb");
        long place = 512;
        kopt_optimizer none = kopt_sgd(0, 0);
        if (file == NULL) stop("there is no such file");
        for (int k = 0; k < LAYERS; ++k) compare(&opt, &t[k], file, &place);
        none.rounding = KOPT_NEAREST, none.seed = SEED, none.step = (uint32_t)batches;
        for (int m = 0; m < MICRO_BATCHES && code != format; ++m)
            for (int k = 0; k < LAYERS; ++k) {
                kopt_tensor r = kopt_tensor_of(residual[m][k], KOPT_BF16, NULL, KOPT_BF16, tensor_size(k), NULL, 0);
                r.id = (uint32_t)(m * LAYERS + k);
                compare(&none, &r, file, &place);
            }
        t[0].n = CHUNK; /* of the first image, for tests/examples/zero1.sh */
        printf("image %zu\n", kopt_save_size(&opt, t, 1));
        if (fseek(file, 0, SEEK_END) != 0 || ftell(file) != place) stop("the file is too long");
        fclose(file);
    }
    return 0;
}
