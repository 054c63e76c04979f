# The package of docs/examples/python on the CUDA runtime of cuda_fake.c, which executes the PTX on the CPU: the
# tensors are in its memory, and every step must have the bits of the CPU. Takes minutes; needs nvcc and PyTorch. Prints
# TAP.
out=build/tests/cuda_torch
mkdir -p $out
nvcc=${NVCC:-nvcc} cc=${CC:-cc}
python=python3
$python -c 'import torch' 2>/dev/null || python=/usr/bin/python3
if ! command -v "$nvcc" >/dev/null || ! $python -c 'import torch' 2>/dev/null; then
    echo "1..0 # SKIP no nvcc or no PyTorch"
    exit
fi
{
    CC=$cc python3 docs/examples/python/backend.py $out &&
        python3 docs/examples/python/bindings.py kahan_opt.h kahan_opt_cuda.cuh $out &&
        $nvcc -I. -O3 -Xcompiler -fPIC -gencode arch=compute_75,code=compute_75 --keep --keep-dir $out \
            -c $out/kahan_opt_cuda.cu -o $out/host.o &&
        python3 tests/gpu/ptx.py $out/kahan_opt_cuda.ptx $out/kernels.c &&
        $cc -std=gnu99 -w -O0 -fPIC -ffp-contract=off -Itests/gpu -c -o $out/kernels.o $out/kernels.c &&
        $cc -std=gnu99 -O2 -fPIC -c -o $out/fake.o tests/gpu/cuda_fake.c &&
        $cc -shared -o $out/kahan_opt/libkahan_opt_cuda.so $out/host.o $out/kernels.o $out/fake.o -lm -lstdc++
} >$out/log 2>&1 || {
    sed 's/^/# /' $out/log | head -40
    echo "not ok 1 - the library of the fake GPU builds"
    echo "1..1"
    exit 1
}
exec $python tests/gpu/cuda_torch.py $out
