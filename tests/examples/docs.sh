# Checks README.md and docs/*.md: each fenced block compiles and runs, or names the file that tests it; commands and
# files in the text exist; links lead somewhere. Prints TAP.
#
# The language of a block says what it is, unless a comment on the line before it says more:
#     <!-- test: file NAME -->   the file NAME of the page's folder; later blocks can use it
#     <!-- test: body -->        the body of a function (c), with the variables of context() below; it runs
#     <!-- test: main CODE -->   a file (c); CODE is the body of a main() that calls it; it runs
#     <!-- test: page -->        a block (c) of a program of several: it has a `static int NAME(void)`,
#                                which runs and returns 0;  page shared: it has none
#     <!-- test: cuda -->        the body of a function (c) that calls the GPU part; it compiles
#     <!-- test: run -->         commands (sh) that run in the page's folder
#     <!-- test: output -->      what the previous block prints (text)
#     <!-- test: recipe NAME --> a change of a trainer (diff): tests/examples/recipes.sh trains it
#     <!-- test: FILE.sh -->     tests/FILE.sh tests it
#     <!-- test: FILE.py -->     tests/FILE.py runs it (python)
# Without a comment: c, cpp and ino are files, which run if they have a main() or a setup(); sh has commands, whose
# words are checked; cmake and meson build the page's folder and run the result.
root=$PWD
out=$root/build/tests/docs
rm -rf "$out"
mkdir -p "$out"
CC=${CC:-cc} CXX=${CXX:-c++}
warnings='-Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow -Wdouble-promotion -Wundef'
warnings="$warnings -Wcast-qual -Werror"
c_flags="-std=c99 $warnings -O1"
cxx_flags="-std=c++11 $warnings -O1"
. tests/tap.sh
have() { command -v "$1" >/dev/null 2>&1; }
tab=$(printf '\t')

# ---- blocks: for each a file OUT/PAGE/LINE.LANGUAGE and a line of OUT/blocks -----------------------------------------

: >"$out/blocks"
: >"$out/wrong"
for page in README.md docs/*.md; do
    [ $page != docs/api.md ] || continue # generated, see below
    name=$(echo "${page%.md}" | tr / _)
    mkdir -p "$out/$name"
    awk -v page="$page" -v name="$name" -v out="$out" '
        function wrong(text) { print page ":" NR ": " text >>(out "/wrong") }
        inside && /^```$/ { inside = 0; close(file); next }
        inside { print >file; next }
        /^[ \t>*-]*(```|~~~)/ {
            language = substr($0, 4)
            if ($0 !~ /^```/) wrong("a fence that is indented or of tildes")
            else if (language !~ /^(c|cpp|ino|sh|cmake|meson|python|text|diff)$/)
                wrong("a block of the language \"" language "\"")
            inside = 1
            file = out "/" name "/" NR "." language
            printf "" >file
            print page "\t" name "\t" NR "\t" language "\t" (marker == "" ? "-" : marker) >>(out "/blocks")
            marker = ""
            next
        }
        marker != "" { wrong("no block behind `test: " marker "`"); marker = "" }
        /<!-- *test/ {
            if ($0 ~ /^<!-- test: [^ ].* -->$/) marker = substr($0, 12, length($0) - 15)
            else wrong("a mark that is not on a line of its own, or ends elsewhere")
        }
        END {
            if (inside) wrong("a block that does not end")
            if (marker != "") wrong("no block behind `test: " marker "`")
        }
    ' "$page"
done
marked() { # marked LANGUAGE MARK: may a block of this language have this mark?
    case "$1 $2" in
    'c -' | 'cpp -' | 'ino -' | 'sh -' | 'cmake -' | 'meson -') ;;
    c\ file\ ?* | cpp\ file\ ?* | ino\ file\ ?* | c\ main\ ?* | 'c body' | 'c page' | 'c page shared' | 'c cuda') ;;
    'sh run' | 'text output') ;;
    diff\ recipe\ ?*) ;;
    [a-z]*\ *.sh | python\ *.py) [ -f tests/*/"$2" ] ;;
    *) false ;;
    esac
}
while IFS="$tab" read -r page name line language mark; do
    marked "$language" "$mark" || echo "$page:$line: a block of $language cannot have the mark \"$mark\"" >>"$out/wrong"
done <"$out/blocks"
cp "$out/wrong" "$out/log"
[ ! -s "$out/wrong" ]
report $? "each of the $(grep -c . "$out/blocks") blocks has a known language and a known mark"

# ---- what the blocks are compiled with -------------------------------------------------------------------------------

# The implementation is compiled once. Blocks that define KAHAN_OPT_IMPLEMENTATION are linked to it, except those with
# macros of their own. Headers of other libraries are stubs, with only the functions that the blocks call.
implementation=$out/kahan_opt.o
printf '#define KAHAN_OPT_VMATH\n#define KAHAN_OPT_IMPLEMENTATION\n#include "kahan_opt.h"\n' >"$out/kahan_opt.c"
$CC -std=c99 -O1 -DKAHAN_OPT_NO_SIMD -I. -c -o "$implementation" "$out/kahan_opt.c" >"$out/log" 2>&1
report $? "the implementation compiles"

# docs/api.md repeats the header's declarations. If they differ from the header, the compiler reports an error.
{
    printf '#define KAHAN_OPT_VMATH\n#include "kahan_opt.h"\n#include "kahan_opt_cuda.cuh"\n'
    awk '/^```c$/ { inside = 1; next } /^```$/ { inside = 0 } 
        inside { if (!macro && /^#define /) macro = 1; if (!macro) print; macro = macro && /\\$/ }' docs/api.md
} >"$out/api.c"
$CC -std=c11 -Wall -Wextra -Werror -Wno-unused -I. "-I$out/stubs" -fsyntax-only "$out/api.c" >"$out/log" 2>&1
report $? "docs/api.md: its declarations are the header's"

mkdir -p "$out/stubs"
cat >"$out/stubs/cuda_runtime_api.h" <<'TEXT'
#ifndef CUDA_STUB_H
#define CUDA_STUB_H
#include <stddef.h>
#ifdef __cplusplus
extern "C" {
#endif
typedef struct cuda_stream *cudaStream_t;
typedef struct cuda_graph *cudaGraph_t;
typedef struct cuda_replay *cudaGraphExec_t;
typedef struct cuda_event *cudaEvent_t;
enum { cudaSuccess = 0, cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2, cudaStreamCaptureModeGlobal = 0 };
int cudaMalloc(void **p, size_t size);
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, cudaStream_t stream);
int cudaMemsetAsync(void *p, int value, size_t size, cudaStream_t stream);
int cudaStreamSynchronize(cudaStream_t stream);
int cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
int cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
int cudaEventSynchronize(cudaEvent_t event);
int cudaStreamBeginCapture(cudaStream_t stream, int mode);
int cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph);
int cudaGraphInstantiate(cudaGraphExec_t *replay, cudaGraph_t graph, unsigned long long flags);
int cudaGraphLaunch(cudaGraphExec_t replay, cudaStream_t stream);
#ifdef __cplusplus
}
#endif
#endif
TEXT
cat >"$out/stubs/mpi.h" <<'TEXT'
/* Two ranks with the same numbers. */
#include <string.h>
typedef int MPI_Datatype;
typedef void (*MPI_Op)(void *in, void *inout, int *n, MPI_Datatype *type);
enum { MPI_UINT16_T, MPI_COMM_WORLD };
#define MPI_IN_PLACE ((void *)0)
static int MPI_Op_create(MPI_Op f, int commutes, MPI_Op *op) { return *op = f, !commutes; }
static int MPI_Op_free(MPI_Op *op) { return *op = 0, 0; }
static int MPI_Allreduce(const void *in, void *out, int n, MPI_Datatype type, MPI_Op op, int world) {
    unsigned short other[64];
    memcpy(other, out, 2 * (size_t)n);
    op(other, out, &n, &type);
    return world != MPI_COMM_WORLD || in != MPI_IN_PLACE;
}
TEXT
cat >"$out/stubs/nccl.h" <<'TEXT'
#include "cuda_runtime_api.h"
typedef struct nccl_comm *ncclComm_t;
enum { ncclUint64, ncclBfloat16, ncclSum = 0, ncclAvg };
int ncclGroupStart(void);
int ncclGroupEnd(void);
int ncclReduceScatter(const void *from, void *to, size_t n, int type, int what, ncclComm_t comm, cudaStream_t stream);
int ncclAllReduce(const void *from, void *to, size_t n, int type, int what, ncclComm_t comm, cudaStream_t stream);
int ncclAllGather(const void *from, void *to, size_t n, int type, ncclComm_t comm, cudaStream_t stream);
int ncclSend(const void *from, size_t n, int type, int peer, ncclComm_t comm, cudaStream_t stream);
int ncclRecv(void *to, size_t n, int type, int peer, ncclComm_t comm, cudaStream_t stream);
TEXT
# Serial prints to stdout; analogRead is a line with the slope 1/2 over pins 0 and 1.
cat >"$out/stubs/Arduino.h" <<'TEXT'
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
enum { A0 = 0, A1 = 1 };
struct Stub {
    void begin(long) {}
    void print(const char *s) { std::printf("%s", s); }
    void println(const char *s) { std::printf("%s\n", s); }
    void println(double x, int digits = 2) { std::printf("%.*f\n", digits, x); }
};
static Stub Serial;
static inline int analogRead(int pin) { static int x; return pin == A0 ? (x = (x + 389) % 1024) : x / 2; }
static inline void delay(unsigned long) {}
void setup();
void loop();
TEXT

context() { # for bodies: a tensor t of N bf16 weights with its opt, and what else pages use
    cat <<'TEXT'
#define KAHAN_OPT_VMATH
#include "kahan_opt.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
enum { N = 1000, M = 10 };
kopt_bf16 weight[N], grad[N], bias[M], bias_grad[M];
float initial[N];
unsigned char state[KOPT_STATE_BYTES(N, 8)], bias_state[KOPT_STATE_BYTES(M, 8)];
kopt_optimizer opt;
kopt_tensor t;
kopt_bf16 activation[N], x[N], dx[N], dy[N], logits[N];
float loss[N];
int32_t target[N];
enum { n = 10, rows = 10, columns = 20 };
void backward(void);
void backward(void)
{
    int i;
    for (i = 0; i < N; ++i) grad[i] = kopt_bf16_from_f32(kopt_f32_from_bf16(weight[i]) - 0.5f);
}
static void fresh(void)
{
    size_t i;
    for (i = 0; i < N; ++i) initial[i] = 1;
    opt = kopt_adamw(1e-3);
    t = KOPT_TENSOR(KOPT_BF16, weight, grad, N, state, sizeof state);
    if (kopt_state_init(&opt, &t, 1, initial) != KOPT_OK) puts("no state");
    backward();
}
TEXT
}
cuda_context() {
    cat <<'TEXT'
#define KAHAN_OPT_VMATH
#include "kahan_opt.h"
#include "kahan_opt_cuda.cuh"
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <stdlib.h>
#define CHECK(call) ((call) == KOPT_OK ? (void)0 : abort())
extern kopt_cuda_plan plan;
extern kopt_optimizer opt;
extern cudaStream_t stream, old_stream;
extern cudaEvent_t event;
extern cudaGraph_t graph;
extern cudaGraphExec_t replay;
extern ncclComm_t comm;
extern kopt_accumulator a;
extern kopt_cuda_status *status;
extern kopt_bf16 *grads, *my_grads, *weights, *my_weights, *pieces, *residual, *grad[8];
extern float *scale_on_gpu, *rate_on_gpu, *sum;
extern kopt_norm *norm;
extern size_t n, shard, size, words;
extern int i, k, r, steps, skips, ranks;
double schedule(int step);
void forward_and_backward(cudaStream_t s);
TEXT
}

# ---- c, cpp, ino -----------------------------------------------------------------------------------------------------

is_program() { grep -q '^int main(' "$1"; }
compile_c() { # compile_c FILE PROGRAM INCLUDES...: makes a program if it has a main(), otherwise an object
    file=$1 program=$2
    shift 2
    implemented=$implementation
    ! grep -q 'define KAHAN_OPT_\(STATIC\|ONLY\|API\|SELF\|NO_SIMD\)' "$file" || implemented=
    [ -z "$implemented" ] || set -- "$@" -DKOPT_IMPLEMENTED_
    if is_program "$file"; then
        $CC $c_flags "$@" -o "$program" "$file" ${implemented:+"$implemented"} -lm
    else
        $CC $c_flags "$@" -c -o "$program.o" "$file"
    fi
}
one_file() { # compiles the block of $page, $line, as it is
    source=$line.$language
    cd "$out/$name"
    case $mark in file\ *)
        mkdir -p "$(dirname "${mark#file }")"
        cp "$source" "${mark#file }"
        source=${mark#file }
        ;;
    main\ *)
        printf '\nint main(void)\n{\n    %s\n}\n' "${mark#main }" >>"$source"
        ;;
    esac
    where="$page:$line"
    : >"$out/log"
    case $source in
    *.c)
        compile_c "$source" "$line" -I. "-I$root" "-I$out/stubs" >"$out/log" 2>&1
        report $? "$where: compiles"
        if is_program "$source"; then
            "./$line" >"$line.output" 2>"$out/log"
            report $? "$where: runs"
        fi
        ;;
    *.h)
        printf '#include "%s"\n' "$source" >"$line.include.c" # together with the declarations that it needs
        $CC -std=c99 -Wall -Wextra -I. "-I$root" "-I$out/stubs" -fsyntax-only "$line.include.c" >"$out/log" 2>&1
        report $? "$where: is a header"
        ;;
    *.cpp | *.ino)
        if ! have "$CXX"; then skip "$where" "no C++ compiler"; cd "$root"; return; fi
        case $source in
        *.ino)
            # Arduino includes Arduino.h in a sketch, calls setup() once and loop() forever.
            printf '#include "Arduino.h"\n#include "%s"\nint main() {\n    setup();\n%s\n}\n' \
                "$source" '    for (int i = 0; i < 20000; i++) loop();' >"$line.sketch.cpp"
            $CXX -std=c++11 -Wall -Wextra -Werror -O1 -I. "-I$root" "-I$out/stubs" -o "$line" "$line.sketch.cpp" \
                >"$out/log" 2>&1
            report $? "$where: compiles"
            "./$line" >"$line.output" 2>"$out/log" && awk 'END { exit !($1 > 0.49 && $1 < 0.51) }' "$line.output"
            report $? "$where: runs, and learns the slope of the stub's data"
            ;;
        *)
            if is_program "$source"; then
                $CXX $cxx_flags \
                    -I. "-I$root" "-I$out/stubs" -DKOPT_IMPLEMENTED_ -o "$line" "$source" "$implementation" \
                    >"$out/log" 2>&1
                report $? "$where: compiles"
                "./$line" >"$line.output" 2>"$out/log"
                report $? "$where: runs"
            else
                $CXX -std=c++11 -Wall -Wextra -Werror -I. "-I$root" "-I$out/stubs" -DKOPT_IMPLEMENTED_ \
                    -c -o "$line.o" "$source" >"$out/log" 2>&1
                report $? "$where: compiles"
            fi
            ;;
        esac
        ;;
    esac
    cd "$root"
}

# ---- sh --------------------------------------------------------------------------------------------------------------

usage=$(sh build.sh help && sh build.sh bench help)
in_usage() { # in_usage COMMAND WORD: does a usage line of the command contain the word?
    echo "$usage" | grep -e "\./build\.sh $1" | grep -q -e "\(^\|[^a-z0-9-]\)$2\([^a-z0-9-]\|\$\)"
}
is_example() {
    [ "$1" = examples ] &&
        { [ -f "docs/examples/$2.c" ] || [ -f "docs/examples/$2.py" ] || [ -f "docs/examples/$2/run.sh" ]; }
}
build_command() { # build_command WORDS...: arguments of ./build.sh; prints nothing if the usage has them
    [ $# -gt 0 ] || return 0
    command=$1
    case $command in help | --help | -h) return ;; esac
    echo "$usage" | grep -q "\./build\.sh $command\([^a-z0-9-]\|\$\)" || { echo "./build.sh has no $command"; return; }
    shift
    first=yes
    for word; do
        case $word in
        --*) [ "$command" = examples ] || in_usage "$command" "$word" ||
            cat build.sh bench/run.sh tests/gpu/cuda_day.sh | grep -q -w -e "$word" ||
            echo "./build.sh $command has no $word" ;;
        *[!a-z0-9_]* | '' | [0-9]*) ;;
        *) # a word of its own, or the value of an option
            [ -z "$first" ] || in_usage "$command" "$word" || is_example "$command" "$word" ||
                echo "./build.sh $command has no $word" ;;
        esac
        first=
    done
}
shell_command() { # shell_command WORDS...: prints nothing if the command can exist
    case $1 in
    ./build.sh) shift; build_command "$@"; return ;;
    sh) [ -f "$2" ] || echo "there is no $2" ;;
    pip) [ -f "$3/pyproject.toml" ] || echo "pip: there is no package $3" ;;
    python) [ "$2 $3" = "-m kahan_opt" ] || echo "python: $2 $3 is not known here" ;;
    cc | nvcc | cmake | meson | cp | mkdir | ./*) ;;
    *) echo "the command $1 is not known here" ;;
    esac
    for word; do
        case $word in tests/*.* | docs/*.* | bench/*.* | kahan_opt*.h | kahan_opt*.cuh)
            [ -e "$word" ] || [ -e "$out/$name/$word" ] || echo "there is no $word" ;;
        esac
    done
}
shell_block() {
    awk '{ # a command on each line: continuations joined, no comments
        text = text $0
        if (sub(/\\$/, "", text)) next
        sub(/^#.*/, "", text)
        sub(/[ \t]#.*/, "", text)
        gsub(/&&|;|\|/, "\n", text)
        print text
        text = ""
    }' "$1" |
        while read -r words; do
            set -f
            set -- $words
            set +f
            [ $# = 0 ] || shell_command "$@"
        done
}

# ---- every block -----------------------------------------------------------------------------------------------------

say_main() { # say_main CALL: a main() that runs CALL before each body and prints the line of each that returns 0
    printf 'int main(void)\n{\n    setvbuf(stdout, NULL, _IONBF, 0);\n'
    while read -r at function; do
        printf '    %s;\n    if (%s() == 0) fputs("%s\\n", stderr);\n' "$1" "$function" "$at"
    done
    printf '    return 0;\n}\n'
}
: >"$out/functions"
last= last_page=
while IFS="$tab" read -r page name line language mark <&3; do
    marked "$language" "$mark" || continue
    block=$out/$name/$line.$language
    [ "$page" = "$last_page" ] || last=
    last_page=$page
    case "$language $mark" in
    *.sh)
        grep -v '^ *\(/\*.*\)\{0,1\}$' "$block" | while read -r text; do
            grep -q -F -e "$text" tests/*/"$mark" || echo "tests/$mark does not have: $text"
        done >"$out/log"
        [ ! -s "$out/log" ]
        report $? "$page:$line: tests/$mark tests it"
        ;;
    python\ *)
        echo "it does not name $page" >"$out/log"
        grep -q -F "$page" tests/*/"$mark"
        report $? "$page:$line: tests/$mark runs it"
        ;;
    *' recipe '*)
        echo "tests/examples/recipes.sh does not name ${mark#recipe }" >"$out/log"
        grep -q -w -e "${mark#recipe }" tests/examples/recipes.sh
        report $? "$page:$line: tests/examples/recipes.sh trains it"
        ;;
    'c page'*)
        { echo "#line $((line + 1)) \"$page\""; cat "$block"; } >>"$out/$name/page.c"
        [ "$mark" = 'page shared' ] || {
            function=$(sed -n 's/^static int \([a-z_0-9]*\)(void)$/\1/p' "$block" | head -1)
            [ -n "$function" ] || { echo "no static int NAME(void)" >"$out/log";
                report 1 "$page:$line: has a function to call"; }
            moves= # in guide.md the blocks that call backward() train w
            ! grep -q '[{ ]backward[(,]' "$block" || moves=yes
            echo "$line $function${moves:+ moves}" >>"$out/$name/page.functions"
        }
        ;;
    'c body')
        { printf 'int body_%s(void);\nint body_%s(void)\n{\n#line %s "%s"\n' "$line" "$line" $((line + 1)) "$page"
            cat "$block"
            printf '    return 0;\n}\n'; } >>"$out/$name/body.c"
        echo "$line body_$line" >>"$out/$name/body.functions"
        ;;
    'c cuda')
        { printf 'void cuda_%s(void);\nvoid cuda_%s(void)\n{\n#line %s "%s"\n' "$line" "$line" $((line + 1)) "$page"
            cat "$block"
            printf '}\n'; } >>"$out/$name/cuda.c"
        ;;
    c\ * | cpp\ * | ino\ *)
        [ $name != docs_guide ] || cp docs/examples/steps/*.[ch] "$out/$name"
        one_file
        last=$out/$name/$line.output
        ;;
    'sh run')
        [ -e "$out/$name/kahan_opt.h" ] || cp kahan_opt.h "$out/$name"
        [ $name != docs_guide ] || cp docs/examples/steps/*.[ch] "$out/$name" # what its programs include
        {
            printf 'cc() { command %s -DKAHAN_OPT_NO_SIMD "$@"; }\nset -e\n' "$CC"
            cat "$block"
        } >"$out/$name/$line.run"
        (cd "$out/$name" && sh "./$line.run") >"$out/$name/$line.output" 2>"$out/log"
        report $? "$page:$line: the commands run"
        last=$out/$name/$line.output
        ;;
    'text output')
        diff "$block" "$last" >"$out/log" 2>&1
        report $? "$page:$line: is what was printed"
        ;;
    sh\ *)
        shell_block "$block" >"$out/log"
        [ ! -s "$out/log" ]
        report $? "$page:$line: the commands are known"
        ;;
    cmake\ * | meson\ *)
        if ! have "$language" || { [ "$language" = meson ] && ! have ninja; }; then
            skip "$page:$line: $language builds the folder" "no $language"
            continue
        fi
        project=$out/$name/$language.$line
        mkdir -p "$project/third_party/kahan_opt"
        cp -r "$out/$name/src" "$project"
        cp kahan_opt.h "$project/third_party/kahan_opt"
        if [ $language = cmake ]; then
            cp "$block" "$project/CMakeLists.txt"
            (cd "$project" && CC=$CC CFLAGS=-DKAHAN_OPT_NO_SIMD cmake -B build && cmake --build build) >"$out/log" 2>&1
        else
            cp "$block" "$project/meson.build"
            (cd "$project" && CC=$CC CFLAGS=-DKAHAN_OPT_NO_SIMD meson setup build && ninja -C build) >"$out/log" 2>&1
        fi && "$project/build/my_program" >>"$out/log" 2>&1
        report $? "$page:$line: $language builds the folder, and the program runs"
        ;;
    *) echo "nothing tests it" >"$out/log"; report 1 "$page:$line: $language, $mark" ;;
    esac
done 3<"$out/blocks"

# Blocks that form one program: each function is called and must return 0. In guide.md the weights must also move.
for page in README.md docs/*.md; do
    name=$(echo "${page%.md}" | tr / _)
    : >"$out/said"
    if [ -e "$out/$name/page.c" ]; then
        after= before=0
        [ $name != docs_guide ] ||
            before='memset(w, 0, sizeof w), memset(bias, 0, sizeof bias), memset(h, 0, sizeof h)'
            after=' || w[N - 1] == 0 || w[N - 1] >= 0x8000'
        {
            printf '#define KAHAN_OPT_IMPLEMENTATION\n#include "kahan_opt.h"\n'
            printf '#include <%s.h>\n' stdio stdlib string
            cat "$out/$name/page.c"
            while read -r at function moves; do
                printf 'static int check_%s(void) { return %s()%s; }\n' "$at" "$function" "${moves:+$after}"
            done <"$out/$name/page.functions"
            sed 's/ .*//; s/.*/& check_&/' "$out/$name/page.functions" | say_main "$before"
        } >"$out/$name/page_program.c"
        compile_c "$out/$name/page_program.c" "$out/$name/page" -I. \
            >"$out/log" 2>&1 && "$out/$name/page" 2>"$out/said" >/dev/null
        report $? "$page: the blocks that form one program compile as shown, and run"
        while read -r at function moves; do
            grep -q "^$at\$" "$out/said"
            report $? "$page:$at: $function runs${moves:+${after:+, and the weights move towards their goal}}"
        done <"$out/$name/page.functions"
    fi
    : >"$out/said"
    if [ -e "$out/$name/body.c" ]; then
        { context && cat "$out/$name/body.c" &&
            say_main 'fresh()' <"$out/$name/body.functions"; } >"$out/$name/body_program.c"
        # a block may declare its own opt or t, and need not use all variables
        $CC $c_flags -Wno-shadow -Wno-unused \
            -I. -o "$out/$name/body" "$out/$name/body_program.c" "$implementation" -lm \
            >"$out/log" 2>&1 &&
            (cd "$out/$name" && ./body 2>"$out/said" >"$out/$name/body.output")
        report $? "$page: the bodies of functions compile as shown, and run"
        while read -r at function; do
            grep -q "^$at\$" "$out/said"
            report $? "$page:$at: runs to its end"
        done <"$out/$name/body.functions"
    fi
    if [ -e "$out/$name/cuda.c" ]; then
        { cuda_context && cat "$out/$name/cuda.c"; } >"$out/$name/cuda_all.c"
        $CC -std=c99 -Wall -Wextra -Werror -Wno-unused -Wno-shadow \
            -I. "-I$out/stubs" -fsyntax-only "$out/$name/cuda_all.c" \
            >"$out/log" 2>&1
        report $? "$page: the bodies of functions for a GPU compile as shown"
    fi
done

# The quick start of kahan_opt_cuda.cuh: the indented lines of begin().
{ cuda_context && echo '#include <stdlib.h>' && sed -n '/^   QUICK START/,/^   After each/p' kahan_opt_cuda.cuh |
    sed -n '/^       kopt_result begin(/,/^       }$/p'; } >"$out/cuda_start.c"
grep -q kopt_cuda_plan_upload "$out/cuda_start.c" &&
    $CC -std=c99 -Wall -Wextra -Werror -I. "-I$out/stubs" -fsyntax-only "$out/cuda_start.c" >"$out/log" 2>&1
report $? "kahan_opt_cuda.cuh: its quick start compiles as shown"

# ---- commands and files in the text ----------------------------------------------------------------------------------

for page in README.md docs/*.md; do
    name=$(echo "${page%.md}" | tr / _)
    # spans of code, which may continue on the next line
    awk '/^```/ { inside = !inside; next } !inside' "$page" | awk 'BEGIN { RS = "" } {
        gsub(/\n/, " ")
        parts = split($0, part, "`")
        for (i = 2; i <= parts; i += 2) print part[i]
    }' >"$out/spans"
    awk '/^```/ { inside = !inside; next }
        !inside && /^    \.\/build\.sh / { sub(/^ */, ""); print }' "$page" >>"$out/spans"
    tr -d '[]' <"$out/spans" | while read -r span; do
        set -f
        set -- $span
        set +f
        case $span in './build.sh '*) shift; build_command "$@" | sed "s,^,$page: ," ;; esac
        for word in $span; do
            case $word in
            tests/*[!a-zA-Z0-9_./*-]* | docs/*[!a-zA-Z0-9_./*-]* | bench/*[!a-zA-Z0-9_./*-]*) ;;
            tests/* | docs/* | bench/*) ls $word* >/dev/null 2>&1 || echo "$page: there is no $word" ;;
            esac
        done
    done
done >"$out/log"
[ ! -s "$out/log" ]
report $? "the commands of build.sh and the files that the text names exist"

# ---- links -----------------------------------------------------------------------------------------------------------

# The anchors of a page: those that it sets, and those that GitHub makes of headings: lower case, with letters, digits,
# _ and - only.
anchors() {
    grep -o '<a id="[^"]*"' "$1" | cut -d '"' -f 2
    awk '/^```/ { inside = !inside; next } !inside && /^#+ / {
        sub(/^#+ +/, "")
        gsub(/\]\([^)]*\)/, "")
        $0 = tolower($0)
        gsub(/[^a-z0-9 _-]/, "")
        gsub(/ /, "-")
        print $0 (seen[$0]++ ? "-" (seen[$0] - 1) : "")
    }' "$1"
}
links=0
for page in README.md docs/*.md; do
    awk '/^```/ { inside = !inside; next } inside { next } {
        gsub(/`[^`]*`/, "")
        while (match($0, /\]\([^)]*\)/)) {
            print substr($0, RSTART + 2, RLENGTH - 3)
            $0 = substr($0, RSTART + RLENGTH)
        }
    }
    /^\[[^]]*\]: / { print $2 }' "$page" | sort -u >"$out/links"
    while read -r link; do
        case $link in *://* | mailto:*) continue ;; esac
        file=${link%%#*} anchor=
        case $link in *'#'*) anchor=${link#*#} ;; esac
        file=$(dirname "$page")/$file
        [ -n "${link%%#*}" ] || file=$page
        if [ ! -e "$file" ]; then echo "$page: there is no $link"; continue; fi
        [ -n "$anchor" ] || continue
        cached=$out/anchors.$(echo "$file" | tr / _)
        [ -e "$cached" ] || anchors "$file" >"$cached"
        grep -q -x -F -e "$anchor" "$cached" || echo "$page: $link: there is no such heading"
    done <"$out/links"
done >"$out/log"
links=$(cat README.md docs/*.md | grep -o '](' | grep -c .)
[ ! -s "$out/log" ] && [ "$links" -gt 20 ]
report $? "links lead to files and headings that exist"
for page in docs/*.md; do
    grep -q -F "($page)" README.md || echo "README.md does not name $page"
done >"$out/log" 2>&1
[ ! -s "$out/log" ]
report $? "README.md names every page"

# Sentences have the figures of tables: the first paragraph of README.md, of its own and of gpu.md's; those about fp16
# and 8-bit moments, of benchmarks.md's.
of_demo() {
    sed -n '/^<!-- figures: demo -->$/,/^<!-- end -->$/p' README.md | awk -v arm="$1" '$1 == arm { print $3 }'
}
of_times() { sed -n "s/^| $1 | [0-9.]* | \**\([0-9.]*\).*/\1/p" README.md; }
of_gpu() { # of_gpu MODE: microseconds of the large tensor, in a graph if there is such a row
    awk -F '[ ]*[|][ ]*' -v mode="$1" '
        $2 == mode || (last == mode && $2 == "... in a graph") { us = $4 }
        { last = $2 }
        END { sub(/,/, "", us); print us }' docs/gpu.md
}
of_cliffs() { # of_cliffs ROW FORMATS: the least and the most of the columns of these formats of moments
    sed -n '/^<!-- figures: cliffs in cache -->$/,/^Every rule/p' docs/benchmarks.md |
        awk -F '[ ]*[|][ ]*' -v row="$1" -v formats=" $2 " '
            $3 == "fp32" { for (i = 3; i < NF; i++) taken[i] = index(formats, " " $i " ") }
            $2 == row {
                for (i = 3; i < NF; i++) if (taken[i]) {
                    if (!least || $i < least) least = $i
                    if ($i > most) most = $i
                }
            }
            END { printf "%.1f %.1f", least, most }'
}
ratio() { awk "BEGIN { printf \"%.$1f\", $2 / $3 }"; }
has() { tr '\n' ' ' <"$1" | tr -s ' ' | grep -q -F -e "$2" || echo "$1 does not have: $2"; }
kahan=$(of_times '\*\*`KOPT_KAHAN`\*\* | bf16') gpu=$(of_gpu 'AdamW, bf16, KAHAN')
{
    has README.md "**$(of_demo kahan) beside fp32's $(of_demo fp32)**"
    wide=$(of_times 'PyTorch [0-9.]*, fused | fp32') narrow=$(of_times 'PyTorch .*nearest) | bf16')
    has README.md "**$(ratio 1 $wide $kahan) times as fast** as PyTorch's fused AdamW in fp32"
    has README.md "**$(ratio 1 $narrow $kahan) times as fast** as that in bf16"
    has README.md "takes $(ratio 2 $gpu $(of_gpu 'PyTorch, fused, fp32')) of PyTorch's time in fp32"
    has README.md "and $(ratio 2 $gpu $(of_gpu 'PyTorch, fused, bf16, which has no residual')) of that in bf16"
    set -- $(of_cliffs 'fp16 kahan' 'fp32 bf16 fp16')
    has docs/benchmarks.md "$1 (fp32 moments) to $2 times (fp16 moments)"
    set -- $(of_cliffs 'fp16 kahan' bf16)
    has docs/faq.md "fp16 weights and gradients and bf16 moments takes $2 times as long"
    set -- $(of_cliffs 'bf16 kahan' 8-bit)
    has docs/benchmarks.md "in DRAM, and $2 times in cache"
} >"$out/log"
[ ! -s "$out/log" ]
report $? "sentences of README.md, benchmarks.md and faq.md have the figures of the tables"
for page in README.md docs/*.md; do # weight and moments in fp32, a copy and a gradient in 16 bits
    awk -F '[ ]*[|][ ]*' -v page=$page '
        !/^[|]/ { column = 0; next }
        !column { for (i = 2; i < NF; i++) if ($i == "bytes per parameter" || $i == "gradient") column = i }
        column && $2 ~ /^mixed precision/ && $column != 16 { print page ": " $0 }' $page
done >"$out/log"
[ ! -s "$out/log" ]
report $? "mixed precision takes 16 bytes per parameter in each table"
all=$(sed -n 's/^all //p' tests/bits/golden.txt)
{
    runs=$(grep -o '[0-9]* runs of [0-9]* builds' README.md)
    tr '\n' ' ' <docs/same-bits.md | grep -q "$runs" || echo "same-bits.md does not have $runs"
    grep -q "print the checksum .$all." README.md || echo "README.md does not have the checksum $all"
    sed -n '/^| architecture/,/^$/p' docs/same-bits.md | grep '^|' | sed 1,2d | grep -v "| $all |\$"
} >"$out/log"
[ ! -s "$out/log" ]
report $? "README.md and the table of same-bits.md have the checksum of tests/bits/golden.txt, and as many runs"
echo "1..$count"
