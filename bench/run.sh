# The benchmarks, a part of build.sh: it defines bench.
# shellcheck shell=sh disable=SC2086

bench_usage() {
    cat <<'TEXT'
./build.sh bench [--gb SIZE]         check the bits, then compare with the memory roofline
./build.sh bench --sizes | --all     how cost grows with n, and a model of it; every combination
./build.sh bench --peers [--gb S]    PyTorch, DeepSpeed, optimi, torchao, bitsandbytes (installs them: 6 GB)
./build.sh bench cliffs [quick]      every combination beside bf16 Kahan AdamW: is any slow?
./build.sh bench compare OLD NEW     two versions of the header in one process (--help: options)
./build.sh bench calls [HEADER]      instructions of a call, by callgrind: what small tensors cost
./build.sh bench one_element [N...]  updates of single weights and kopt_kahan_add(), beside fp32
./build.sh bench forward             weights of 16 bits in a forward and a backward pass in plain C
./build.sh bench beside [NAME]       average bytes compress fp16 norm odd, each beside what one would compare it with
./build.sh bench checkpoint [N]      kopt_save() and kopt_load() in memory, beside memcpy()
./build.sh bench flags [N [OFFSET]]  the header built with -O0, -O3 -march=native and clang, beside -O2
./build.sh bench atan2               the rules of KAHAN_OPT_VMATH beside AdamW, also by SLEEF if installed
./build.sh bench wasm [ROUNDS]       WebAssembly without and with its vectors, in node
./build.sh bench torch [ROUNDS]      a step of KahanAdamW beside torch's AdamW, for 1 to 10,000 tensors
./build.sh bench torch tests         our tests with the newest PyTorch, and those of others (installs it: 6 GB)
./build.sh bench converters          convert.py with bitsandbytes, optimi, torchao (installs them: 6 GB)
./build.sh bench fidelity [quick]    what 16 bit loses, with error bars (docs/evidence.md); draw: once more
./build.sh bench finetuning [quick | bandit | policy] 16-bit checkpoints: what is seen (docs/fine-tuning.md)
./build.sh bench scale [quick]       a GPT of a million weights, also fine-tuned (docs/evidence.md)
./build.sh bench tasks [quick]       average, rare rows, residual net, policy, drift (docs/evidence.md)
./build.sh bench theorem1            how far from the solution SGD with 16-bit weights ends
./build.sh bench bytes [N | margins] excess risk by bytes a parameter, 16 to 6 (docs/evidence.md)
./build.sh bench codes               whole steps with 8-bit moments beside those with fp32 moments
./build.sh bench q8 [check | ...]    which 8-bit code serves the moments of AdamW? (docs/evidence.md)
TEXT
}

# Installs PyTorch, optimi, torchao, bitsandbytes, HeavyBall and DeepSpeed into build/peers, once: remove that folder to
# try again. PyTorch brings 5 GB of CUDA, which stay unused; DeepSpeed compiles its optimizer when it is first used.
install_peers() {
    if [ -e build/peers/tried ] || ! python3 -m pip --version >/dev/null 2>&1; then return; fi
    echo "installing PyTorch, optimi, torchao, bitsandbytes, HeavyBall and DeepSpeed into build/peers ..."
    mkdir -p build/peers
    pip_peers torch || echo "peers: PyTorch could not be installed" >&2
    for package in numpy packaging; do pip_peers --no-deps "$package" || true; done
    for package in torch-optimi torchao bitsandbytes heavyball opt-einsum; do
        pip_peers --no-deps "$package" || echo "peers: $package could not be installed" >&2
    done
    for package in einops hjson msgpack ninja psutil py-cpuinfo pydantic tqdm setuptools wheel; do
        pip_peers "$package" || true
    done
    DS_BUILD_OPS=0 PYTHONPATH=$PWD/build/peers pip_peers --no-deps --no-build-isolation deepspeed ||
        echo "peers: deepspeed could not be installed" >&2
    : >build/peers/tried
}
pip_peers() {
    set -- env PIP_ROOT_USER_ACTION=ignore python3 -m pip install -q --retries 1 --target build/peers "$@"
    ! have timeout || set -- timeout 360 "$@" # seconds per package
    "$@"
}

# Goes on as a Python program, with a Python that has the modules: in build/peers, or Debian's. Returns if none has.
exec_python() { # exec_python MODULES PROGRAM ARGUMENT...
    modules=$1
    shift
    for peers in build/peers ''; do
        for python in python3 /usr/bin/python3; do
            if PYTHONPATH=$peers "$python" -c "import $modules" 2>/dev/null; then
                exec env "PYTHONPATH=$peers" PYTHONDONTWRITEBYTECODE=1 "$python" "$@"
            fi
        done
    done
}

# Compiles one part of bench/peers.c with flags of its own. Linking is without -Ofast, which would make the process
# flush subnormals.
peer() { # peer NAME FLAG...
    name=$1
    shift
    $CC "$@" -fPIC -c -o "build/bench/peers_$name.o" bench/peers.c
    objects="$objects build/bench/peers_$name.o"
}
bench_peers() {
    mkdir -p build/bench
    objects=''
    peer ours -DOURS -std=c99 -O2
    peer naive -DNAIVE=naive_step -O3 -march=native
    peer vector -DNAIVE=naive_vector_step -O3 -march=native -fno-math-errno
    peer llmc -DLLMC -Ofast -march=native
    peer ggml -DGGML -O3 -march=native
    $CC -shared -o build/bench/peers.so $objects -lm
    install_peers
    exec_python torch bench/peers.py "$@"
    have python3 || { echo "bench: --peers needs python3" >&2; exit 2; }
    exec python3 bench/peers.py "$@"
}

# docs/examples/convert.py with the packages of PyPI.
bench_converters() {
    knows 'bench converters' '' "$@"
    python_library build/python
    install_peers
    [ -d build/peers/safetensors ] || pip_peers --no-deps safetensors
    PYTHONPATH=$PWD/build/peers exec python3 bench/converters.py build/python
}

# bench/fidelity.py, finetuning.py, scale.py or tasks.py with a Python that has PyTorch, scikit-learn and matplotlib: in
# build/peers, or Debian's. `quick` and `draw` install nothing.
bench_fidelity() { # bench_fidelity NAME WORD...
    evidence=$1
    shift
    words='quick draw'
    [ $evidence != finetuning ] || words="$words bandit policy"
    knows "bench $evidence" "$words" "$@"
    mkdir -p build/bench
    if [ $# = 0 ]; then
        install_peers
        [ ! -d build/peers/torch ] || [ -d build/peers/sklearn ] || pip_peers scikit-learn matplotlib || true
    fi
    newer_library build/bench/python || python_library build/bench/python
    exec_python 'torch, sklearn, matplotlib' "bench/$evidence.py" "$@"
    echo "bench: $evidence needs PyTorch, scikit-learn and matplotlib; ./build.sh setup installs them" >&2
    exit 2
}

# One program with several builds of the header: see bench/flags.c.
flags_build() { # flags_build NAME COMPILER FLAG...: skipped without the compiler
    name=$1
    shift
    have "$1" || return 0
    "$@" -c -DSTEP="step_$name" -o "build/bench/flags_$name.o" bench/flags.c
    objects="$objects build/bench/flags_$name.o" builds="$builds BUILD($name)"
}
bench_flags() {
    mkdir -p build/bench
    objects='' builds=''
    flags_build O2 $CC -O2
    flags_build O0 $CC -O0
    flags_build O3_native $CC -O3 -march=native
    flags_build clang_O2 clang -O2
    $CC -std=c99 -O2 "-DBUILDS=$builds" -o build/bench/flags bench/flags.c $objects
    exec build/bench/flags "$@"
}
bench_forward() { # the loops of a program, with its flags; the library as everywhere, with -O2
    knows bench forward "$@"
    mkdir -p build/bench
    printf '#define KAHAN_OPT_IMPLEMENTATION\n#include "kahan_opt.h"\n' >build/bench/forward_library.c
    $CC -O2 -I. -c -o build/bench/forward_library.o build/bench/forward_library.c
    columns=0 heads='' lines='|---|'
    for flags in -O2 '-O3 -march=native' '-O3 -march=native -ffast-math'; do
        columns=$((columns + 1)) heads="$heads $flags: fp32, ns | bf16 | fp16 |" lines="$lines---|---|---|"
        $CC -std=c99 $flags -o build/bench/forward bench/forward.c build/bench/forward_library.o
        build/bench/forward $columns >build/bench/forward_$columns
    done
    printf '| |%s\n%s\n' "$heads" "$lines"
    paste -d ' ' build/bench/forward_1 build/bench/forward_2 build/bench/forward_3 | sed 's/ | |/ |/g'
}
cuda_program() { # cuda_program FOLDER FLAG...: bench/cuda.c with the headers in a folder
    folder=$1
    shift
    printf '#define KAHAN_OPT_CUDA_IMPLEMENTATION\n#include "kahan_opt_cuda.cuh"\n' >build/bench/kernels.cu
    set -- "-I$folder" -O3 "$@" "$folder/bench/cuda.c" build/bench/kernels.cu -ldl
    $NVCC -arch=native "$@" 2>/dev/null || $NVCC "$@"
}
bench_cuda() { # bench_cuda [COMMIT]: nvcc is there
    mkdir -p build/bench
    cuda_program . -o build/bench/cuda
    if [ $# -gt 0 ]; then
        other=build/bench/other
        mkdir -p $other/bench $other/tests/gpu
        for file in kahan_opt.h kahan_opt_cuda.cuh; do git show "$1:$file" >$other/$file; done
        cp bench/cuda.c $other/bench
        cp tests/gpu/cuda_device.h $other/tests/gpu
        cuda_program $other -shared -Xcompiler -fPIC -o $other/cuda.so
        build/bench/cuda beside $other/cuda.so || [ $? = 77 ]
        exit
    fi
    CUDA_ROWS=build/bench/cuda.csv
    export CUDA_ROWS
    rm -f $CUDA_ROWS
    build/bench/cuda || [ $? = 77 ] # without a GPU it says so and writes no table
    [ -s $CUDA_ROWS ] || exit 0
    if ! python3 -c 'import torch' 2>/dev/null; then
        install_peers
        PYTHONPATH=$PWD/build/peers${PYTHONPATH:+:$PYTHONPATH}
        export PYTHONPATH
    fi
    exec python3 bench/cuda_peers.py $CUDA_ROWS # names missing packages
}

bench_torch() {
    knows 'bench torch' 'N tests' "$@"
    python_library build/python
    if [ "${1:-}" = tests ]; then
        install_peers
        for test in test_torch test_torch_optim test_torch_many; do
            (exec_python torch tests/examples/$test.py build/python)
        done
        exec python3 bench/suites.py
    fi
    exec_python torch bench/torch_steps.py "$@"
    echo "bench: torch needs PyTorch: ./build.sh setup, or bench --peers, installs it" >&2
    exit 2
}

bench_program() { # bench_program NAME ARGUMENT...
    program=$1
    shift
    mkdir -p build/bench
    $CC -std=c99 ${optimize:--O2} -o "build/bench/$program" "bench/$program.c" -lm -lpthread
    if [ $program = atan2 ] &&
        $CC -std=c99 -O2 -DKAHAN_OPT_SLEEF -o build/bench/atan2_sleef bench/atan2.c -lsleef -lm 2>/dev/null; then
        build/bench/atan2_sleef "$@"
    fi
    exec "build/bench/$program" "$@"
}

bench() {
    name=${1:-}
    case $name in
    help) bench_usage ;;
    compare | calls) shift && exec sh bench/$name.sh "$@" ;; # they check their own arguments
    q8) shift && optimize=-O3 && bench_program q8 "$@" ;;
    fidelity | finetuning | scale | tasks) bench_fidelity "$@" ;;
    torch | converters) shift && bench_$name "$@" ;;
    beside)
        knows 'bench beside' 'beside average bytes compress fp16 norm odd' "$@"
        shift
        bench_program beside "$@"
        ;;
    bytes) shift && knows 'bench bytes' 'N margins' "$@" && bench_program bytes "$@" ;;
    codes) shift && knows 'bench codes' '' "$@" && bench_program codes ;;
    wasm) shift && knows 'bench wasm' N "$@" && exec sh bench/wasm.sh "$@" ;;
    cliffs)
        knows 'bench cliffs' \
            'cliffs quick cache dram --markdown --nearest-stores scalar sse2 avx2 avx512 neon simd128' "$@"
        bench_program "$@"
        ;;
    *)
        knows bench '--gb --sizes --all --peers flags forward theorem1 atan2 one_element checkpoint N' "$@"
        case $name in
        --peers) shift && bench_peers "$@" ;;
        flags) shift && bench_flags "$@" ;;
        forward) bench_forward "$@" ;;
        theorem1 | atan2 | one_element | checkpoint) bench_program "$@" ;;
        *) bench_program bench "$@" ;;
        esac
        ;;
    esac
}
