# The package of docs/examples/python on the driver of cuda_fake.c, which executes the PTX on the CPU: the tensors are
# in its memory, and every step must have the bits of the CPU. Takes minutes; needs nvcc and PyTorch. Prints TAP.
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
    CC=$cc NVCC=$nvcc python3 docs/examples/python/backend.py $out cuda &&
        python3 tests/gpu/ptx.py $out/kahan_opt_cuda.ptx $out/kernels.c &&
        $cc -std=gnu99 -w -O0 -fPIC -ffp-contract=off -Itests/gpu -c -o $out/kernels.o $out/kernels.c &&
        $cc -std=gnu99 -O2 -fPIC -c -o $out/fake.o tests/gpu/cuda_fake.c &&
        $cc -shared -Wl,-soname,libcuda.so.1 -o $out/libcuda.so.1 $out/kernels.o $out/fake.o -lm
} >$out/log 2>&1 || {
    sed 's/^/# /' $out/log | head -40
    echo "not ok 1 - the package and the fake driver build"
    echo "1..1"
    exit 1
}
LD_LIBRARY_PATH=$out${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} exec $python tests/gpu/cuda_torch.py $out
