// train.go - the header called from Go, by cgo, which reads the header itself.
package main

/*
#cgo CFLAGS: -O2
#define KAHAN_OPT_IMPLEMENTATION
#include "kahan_opt.h"
#include <stdlib.h>
*/
import "C"

import (
	"fmt"
	"unsafe"
)

const n = 1000

func check(result C.kopt_result) {
	if result != C.KOPT_OK {
		panic(C.GoString(C.kopt_result_string(result)))
	}
}

// A kopt_tensor holds pointers, and C must not be given Go memory with pointers to Go memory: so all of it is C's.
func allocate(size C.size_t) unsafe.Pointer { return C.calloc(1, size) }

func main() {
	weight := (*[n]C.kopt_bf16)(allocate(2 * n))
	grad := (*[n]C.kopt_bf16)(allocate(2 * n))
	for i := range grad {
		grad[i] = C.kopt_bf16_from_f32(1)
	}
	opt := C.kopt_adamw(1e-3)
	opt.weight_decay = 0.1
	t := C.kopt_tensor_of(unsafe.Pointer(weight), C.KOPT_BF16, unsafe.Pointer(grad), C.KOPT_BF16, n, nil, 0)
	t.state_size = C.kopt_state_size(&opt, &t)
	t.state = allocate(t.state_size)
	check(C.kopt_state_init(&opt, &t, 1, nil))
	for i := 0; i < 100; i++ {
		check(C.kopt_optimizer_step(&opt, &t, 1))
	}
	fmt.Printf("Go     %04x %04x %04x\n", weight[0], weight[1], weight[n-1])
}
