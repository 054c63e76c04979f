/* cuda_use.c - a C program that uses kahan_opt_cuda.cuh without any CUDA header but the runtime's C interface. On a
   machine without a GPU every launch must come back as a code; the program goes on. Prints one line. */
#define KAHAN_OPT_IMPLEMENTATION
#include "../../kahan_opt.h"
#include "../../kahan_opt_cuda.cuh"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int cudaPeekAtLastError(void); /* they are C functions of the runtime, with enums for results */
int cudaGetLastError(void);
int cudaGetDeviceCount(int *count);

int main(void) {
    static uint16_t weight[100], grad[100];
    static unsigned char state[KOPT_STATE_BYTES(100, 6)], other[KOPT_STATE_BYTES(100, 6)];
    static float read[100];
    kopt_accumulator sum = kopt_accumulator_of(weight, KOPT_BF16, NULL, 100);
    kopt_optimizer opt = kopt_adamw(1e-3);
    kopt_tensor t = kopt_tensor_of(weight, KOPT_BF16, grad, KOPT_BF16, 100, state, sizeof state), host = t;
    kopt_cuda_group group = {&opt, &t, 1};
    kopt_cuda_options options = {0, 0, 0, NULL, NULL, NULL, {0, 0, 0, 0}};
    kopt_cuda_plan plan;
    size_t size = kopt_cuda_plan_size(&group, 1);
    void *bytes = malloc(size);
    int devices = 0, code = cudaGetDeviceCount(&devices), bad = 0;
    if (code == 0 && devices > 0) {
        puts("there is a GPU: its own tests say more");
        return 0;
    }
    bad += kopt_cuda_plan_build(&plan, bytes, size, &group, 1) != KOPT_OK;
    bad += cudaPeekAtLastError() != code; /* not touched by us */
    bad += kopt_cuda_plan_upload(&plan, bytes, NULL) != KOPT_ERROR_ISA || plan.device != NULL;
    plan.device = bytes; /* nothing runs, so nothing reads it */
    bad += kopt_cuda_plan_step(&plan, NULL) != KOPT_ERROR_ISA;
    bad += kopt_cuda_plan_measure(&plan, NULL) != KOPT_ERROR_ISA;
    bad += kopt_cuda_plan_set_options(&plan, &options, NULL) != KOPT_ERROR_ISA;
    bad += kopt_cuda_plan_set_optimizer(&plan, 0, &opt, NULL) != KOPT_ERROR_ISA;
    bad += kopt_cuda_plan_set_step(&plan, 0, NULL) != KOPT_ERROR_ISA;
    bad += kopt_cuda_plan_acknowledge(&plan, NULL) != KOPT_ERROR_ISA;
    bad += kopt_cuda_state_init(&opt, &t, 1, NULL, NULL) != KOPT_ERROR_ISA;
    bad += kopt_cuda_plan_set_arrays(&plan, 0, 1, &t, NULL) != KOPT_ERROR_ISA;
    host.weight = grad, host.grad = NULL, host.state = other;
    bad += kopt_cuda_state_save(&plan, 0, &opt, &t, &host, NULL) != KOPT_ERROR_ISA;
    bad += kopt_state_init(&opt, &host, 1, NULL) != KOPT_OK;
    bad += kopt_cuda_state_load(&opt, &t, &host, NULL) != KOPT_ERROR_ISA;
    bad += kopt_cuda_accumulator_add(&sum, grad, KOPT_BF16, 1, NULL, NULL, NULL) != KOPT_ERROR_ISA || sum.count != 0 ||
           sum.step != 0;
    bad += kopt_cuda_accumulator_read(&sum, read, NULL, NULL) != KOPT_ERROR_ISA;
    bad += cudaGetLastError() == 0; /* still there */
    printf("%d wrong without a GPU (CUDA code %d: %s)\n", bad, code,
           kopt_result_string(kopt_cuda_plan_step(&plan, NULL)));
    free(bytes);
    return bad != 0;
}
