# The interface between a program and an implementation that was compiled from another header, or with other flags: what
# may differ, and that all else is refused before any memory is touched (abi.c). And parsers that read the declarations:
# LuaJIT, cffi, SWIG, modules of C++20. Prints TAP.
out=build/tests/abi
rm -rf $out
mkdir -p $out
CC=${CC:-cc}
. tests/tap.sh
have() { command -v "$1" >/dev/null 2>&1; }
this=$(sed -n 's/^#define KOPT_VERSION \([0-9]*\).*/\1/p' kahan_opt.h)

header() { # header NAME SED...: makes $out/NAME/kahan_opt.h; each of the edits must change something
    name=$1
    shift
    mkdir -p $out/$name
    cp kahan_opt.h $out/$name/kahan_opt.h
    for edit; do
        sed "$edit" $out/$name/kahan_opt.h >$out/edited.h
        if cmp -s $out/edited.h $out/$name/kahan_opt.h; then
            echo "no longer in the header: $edit" >$out/log
            report 1 "the header $name"
        fi
        mv $out/edited.h $out/$name/kahan_opt.h
    done
}
version() { # version NAME NUMBER
    header $1 "s/KOPT_VERSION $this/KOPT_VERSION $2/; s/KOPT_VERSION != $this/KOPT_VERSION != $2/
        s|$this / 10000|$2 / 10000|"
}
library() { # library NAME FLAG...: the implementation of the header in $out/NAME, as $out/NAME.o
    name=$1
    shift
    printf '#define KAHAN_OPT_IMPLEMENTATION\n#include "kahan_opt.h"\n' >$out/implementation.c
    $CC -O1 -DKAHAN_OPT_NO_SIMD "$@" -I$out/$name -c -o $out/$name.o $out/implementation.c
}
program() { # program LIBRARY HEADER COMPILER...: builds the program, compiled with this header
    object=$1 name=$2
    shift 2
    "$@" -Wall -Wextra -Werror -I$out/$name -c -o $out/abi.o tests/robust/abi.c >$out/log 2>&1 &&
        $CC -o $out/abi $out/abi.o $out/$object.o >$out/log 2>&1
}
calls() { # calls WORD: the program gets what WORD says
    $out/abi $1 >$out/log 2>&1
}
case_of() { # case_of DESCRIPTION WORD HEADER FLAG...: with the compilers of C and C++
    what=$1 word=$2 name=$3
    shift 3
    for compiler in "$CC -O1" 'g++ -x c++ -O1' 'clang -O0' 'clang++ -x c++ -O0'; do
        have ${compiler%% *} || continue
        program plain $name $compiler "$@" && calls $word
        report $? "$what: $word, $compiler"
    done
}

header plain
library plain >$out/log 2>&1
report $? "the implementation compiles"
for tool in g++ clang clang++; do have $tool || missing "no $tool"; done

# ---- another header, other flags -------------------------------------------------------------------------------------

header smaller 's/uint64_t reserved_\[7\]; /uint64_t reserved_[6]; /'
header larger 's/uint64_t reserved_\[7\]; /uint64_t reserved_[40];/'
header smaller_tensor 's/uint64_t reserved_\[2\]; /uint64_t reserved_[1]; /' 's/1, 0,    {0, 0}};/1, 0,    {0}};/'
header larger_tensor 's/uint64_t reserved_\[2\]; /uint64_t reserved_[9]; /'
version later $((this + 1))
version much_later $((this + 10000))
version earlier $((this - 1))
header field 's/uint64_t reserved_\[7\]; /double field; uint64_t reserved_[6]; /'
header tensor_field 's/uint64_t reserved_\[2\]; /double field; uint64_t reserved_[1]; /' \
    's/1, 0,    {0, 0}};/1, 0, 0, {0}};/'
printf '#pragma pack(1)\n' >$out/pack.h

case_of "the same header" works plain
case_of "a smaller optimizer under one version number" version smaller
case_of "a larger optimizer under one version number" version larger
case_of "a smaller tensor" version smaller_tensor
case_of "a larger tensor" version larger_tensor
case_of "the next version" version later
case_of "the next major version" version much_later
case_of "the version before" version earlier
case_of "-fshort-enums" version plain -fshort-enums
case_of "-fpack-struct=1" works plain -fpack-struct=1
case_of "#pragma pack(1)" works plain -include $out/pack.h -Wno-pragma-pack
case_of "a later header, whose new field is not used" works field
case_of "a later header, whose new field is used" option field -DOPTIMIZER_FIELD=field
case_of "a tensor of a later header, whose new field is not used" works tensor_field
case_of "a tensor of a later header, whose new field is used" option tensor_field -DTENSOR_FIELD=field
case_of "an optimizer of zeros" uninitialized plain -DZEROS

# From 1.0 on, only the major version counts.
version major 10203 && library major && version minor 10999 && version next_major 20000
for case in major:works minor:works next_major:version plain:version; do
    program major ${case%:*} $CC -O1 && calls ${case#*:}
    report $? "an implementation of version 1.2.3, the header of ${case%:*}: ${case#*:}"
done

# Without one of its comparisons, the guard lets a program pass.
without() { # without PATTERN REPLACEMENT HEADER: in the implementation
    header blind "s/$1/$2/" && library blind && program blind $3 $CC -O1 && ! calls version
    report $? "without \`$1\` the test of this header fails: $3"
}
without '!same_version ||' '' later
without 'opt_size != sizeof \*opt ||' '' smaller
without 'opt_size != sizeof \*opt ||' '' larger
without '|| tensor_size != sizeof(kopt_tensor)' '' larger_tensor
without 'memset(opt, 0, opt_size);' 'memset(opt, 0, 2 * opt_size);' larger
without 'MUST_(opt->made_ == KOPT_MADE_ || opt->made_ >> 16 != KOPT_MADE_ >> 16, VERSION' 'MUST_(1, VERSION' larger

# ---- two headers in one program --------------------------------------------------------------------------------------

# In C++, linkers merge inline functions of one name.
printf 'int first(int, char **), second(int, char **);\nint main(int count, char **arguments) {\n' >$out/two.cpp
printf '    char words[2][9] = {"works", "version"}, *of[2][2] = {{*arguments, words[0]}, {*arguments, words[1]}};\n' \
    >>$out/two.cpp
printf '    return count + 2 * (first(2, of[0]) + second(2, of[1])) - 1;\n}\n' >>$out/two.cpp
for compiler in 'clang++ -x c++ -O0' 'g++ -x c++ -O1 -fno-inline'; do
    have ${compiler%% *} || continue
    $compiler -Dmain=first -I$out/plain -c -o $out/first.o tests/robust/abi.c >$out/log 2>&1 &&
        $compiler -Dmain=second -I$out/larger -c -o $out/second.o tests/robust/abi.c >>$out/log 2>&1
    for order in 'first second' 'second first'; do
        ${compiler%% *} -o $out/two $out/two.cpp $out/${order% *}.o $out/${order#* }.o $out/plain.o >>$out/log 2>&1 &&
            $out/two >>$out/log 2>&1
        report $? "two files of C++ with two headers, $order: $compiler"
    done
done

# Libraries: a program of another header with a shared library; plugins, which a program loads.
have_dl() { printf '#include <dlfcn.h>\nint main(void) { return dlopen("", 1) != 0; }\n' | $CC -x c -o $out/dl - -ldl; }
if have_dl >$out/log 2>&1; then
    library plain -fPIC && $CC -shared -o $out/libplain.so $out/plain.o
    for case in plain:works larger:version; do
        $CC -I$out/${case%:*} -o $out/abi tests/robust/abi.c -L$out -lplain "-Wl,-rpath,$PWD/$out" >$out/log 2>&1 &&
            $out/abi ${case#*:} >$out/log 2>&1
        report $? "a shared library, the program with the header ${case%:*}: ${case#*:}"
    done
    cat >$out/host.c <<'TEXT'
#include <dlfcn.h>
#include <stdio.h>
int app(int, char **);
int main(int count, char **arguments) { /* host PLUGIN WORD: its own training works before and after the plugin's */
    char works[] = "works", *own[2];
    void *const plugin = dlopen(arguments[count - 2], RTLD_NOW);
    int (*run)(int, char **);
    own[0] = *arguments, own[1] = works;
    if (plugin == NULL) return puts(dlerror()), 1;
    *(void **)&run = dlsym(plugin, "plugin");
    return app(2, own) || run(2, arguments + count - 2) || app(2, own);
}
TEXT
    $CC -Dmain=app -I$out/plain -c -o $out/app.o tests/robust/abi.c &&
        $CC -rdynamic -o $out/host $out/host.c $out/app.o $out/plain.o -ldl
    header private_larger "s/uint64_t reserved_\[7\]; /uint64_t reserved_[40];/" \
        "s/KOPT_VERSION $this/KOPT_VERSION $((this + 1))/; s/KOPT_VERSION != $this/KOPT_VERSION != $((this + 1))/"
    private='-DKAHAN_OPT_STATIC -DKAHAN_OPT_NO_SIMD -DKAHAN_OPT_IMPLEMENTATION'
    for case in plain:works larger:version later:version "private_larger:works:$private"; do
        name=${case%%:*} word=${case#*:} flags=
        case $word in *:*) flags=${word#*:} word=${word%%:*} ;; esac
        $CC -fPIC -shared $flags -Dmain=plugin -I$out/$name -o $out/plugin.so tests/robust/abi.c >$out/log 2>&1 &&
            $out/host $out/plugin.so $word >$out/log 2>&1
        report $? "a plugin with the header $name${flags:+ and a private implementation}: $word"
    done

    # ---- parsers of declarations -------------------------------------------------------------------------------------

    # What a C compiler leaves of the declarations: all, and the lines of kahan_opt.h itself.
    for kind in plain bindings; do
        options=
        [ $kind = plain ] || options=-DKAHAN_OPT_BINDINGS
        for more in '' -DKAHAN_OPT_VMATH; do
            echo '#include "kahan_opt.h"' >$out/declare.c
            $CC -E -P $options $more -I. $out/declare.c >$out/$kind$more.all
            $CC -E $options $more -I. $out/declare.c |
                awk '/^# /{ours = /kahan_opt\.h/; next} ours && NF && !/^#/' >$out/$kind$more.own
        done
    done
    if have luajit; then
        cat >$out/train.lua <<'TEXT'
local ffi = require "ffi"
local path, library, version = arg[1], arg[2], tonumber(arg[3])
ffi.cdef(io.open(path):read "*a")
local kopt = ffi.load(library)
local opt, t, state = ffi.new "kopt_optimizer", ffi.new "kopt_tensor", ffi.new "unsigned char[1000]"
local weight, grad = ffi.new "kopt_bf16[40]", ffi.new("kopt_bf16[40]", 0x3F80)
local size = ffi.sizeof(opt)
assert(kopt.kopt_optimizer_init(opt, kopt.KOPT_RULE_ADAMW, 1e-3, version, size - 8, ffi.sizeof(t)) ==
    kopt.KOPT_ERROR_VERSION)
assert(kopt.kopt_optimizer_init(opt, kopt.KOPT_RULE_ADAMW, 1e-3, version, size, ffi.sizeof(t)) == kopt.KOPT_OK)
t.weight, t.grad, t.state, t.state_size, t.n = weight, grad, state, 1000, 40
t.weight_format, t.grad_format = kopt.KOPT_BF16, kopt.KOPT_BF16
assert(kopt.kopt_state_init(opt, t, 1, nil) == kopt.KOPT_OK)
assert(kopt.kopt_optimizer_step(opt, t, 1) == kopt.KOPT_OK and weight[39] ~= 0)
TEXT
        for source in plain.all plain-DKAHAN_OPT_VMATH.all bindings.all bindings-DKAHAN_OPT_VMATH.own; do
            luajit $out/train.lua $out/$source $out/libplain.so $this >$out/log 2>&1
            report $? "LuaJIT: $source"
        done
    else missing "no luajit"; fi
    if /usr/bin/python3 -c 'import cffi' 2>/dev/null; then
        cat >$out/train.py <<'TEXT'
import sys
import cffi
ffi = cffi.FFI()
ffi.cdef(open(sys.argv[1]).read())
kopt, version = ffi.dlopen(sys.argv[2]), int(sys.argv[3])
opt, t, state = ffi.new("kopt_optimizer *"), ffi.new("kopt_tensor *"), ffi.new("unsigned char[1000]")
weight, grad = ffi.new("kopt_bf16[40]"), ffi.new("kopt_bf16[40]", [0x3F80] * 40)
sizes = ffi.sizeof("kopt_optimizer"), ffi.sizeof("kopt_tensor")
assert kopt.kopt_optimizer_init(opt, kopt.KOPT_RULE_ADAMW, 1e-3, version, sizes[0], sizes[1] + 8) == \
    kopt.KOPT_ERROR_VERSION
assert kopt.kopt_optimizer_init(opt, kopt.KOPT_RULE_ADAMW, 1e-3, version, *sizes) == kopt.KOPT_OK
t.weight, t.grad, t.state, t.state_size, t.n = weight, grad, state, 1000, 40
t.weight_format = t.grad_format = kopt.KOPT_BF16
assert kopt.kopt_state_init(opt, t, 1, ffi.NULL) == kopt.KOPT_OK
assert kopt.kopt_optimizer_step(opt, t, 1) == kopt.KOPT_OK and weight[39] != 0
TEXT
        for source in bindings.own bindings-DKAHAN_OPT_VMATH.own; do
            /usr/bin/python3 $out/train.py $out/$source $out/libplain.so $this >$out/log 2>&1
            report $? "cffi: $source"
        done
    else missing "no cffi"; fi
else missing "no dlopen"; fi

if have swig; then
    printf '%%module kopt\n%%include <stdint.i>\n%%include "kahan_opt.h"\n' >$out/kopt.i
    for options in '' -DKAHAN_OPT_BINDINGS -DKAHAN_OPT_VMATH; do
        swig -python -Werror $options -I. -outdir $out -o $out/wrap.c $out/kopt.i >$out/log 2>&1 && [ ! -s $out/log ] &&
            grep -q _wrap_kopt_optimizer_init $out/wrap.c && ! grep -q '_wrap_kopt_[a-z0-9_]*_(' $out/wrap.c
        report $? "SWIG $options"
    done
else missing "no swig"; fi

clang=
for version in 22 21 20 19; do [ -n "$clang" ] || ! have clang++-$version || clang=clang++-$version; done
if [ -n "$clang" ]; then
    cat >$out/kahan.cppm <<'TEXT'
module;
#include "kahan_opt.h"
export module kahan;
export {
    using ::kopt_optimizer; using ::kopt_tensor; using ::kopt_result; using ::kopt_scaler; using ::kopt_counts;
    using ::kopt_adamw; using ::kopt_sgd; using ::kopt_ema; using ::kopt_tensor_of; using ::kopt_scaler_of;
    using ::kopt_state_init; using ::kopt_optimizer_step; using ::kopt_f32_from_bf16; using ::kopt_bf16_from_f32;
    using ::kopt_kahan_add_bf16; using ::kopt_inline_optimizer_of; using ::kopt_inline_adamw;
    using ::KOPT_BF16; using ::KOPT_OK;
}
TEXT
    cat >$out/importer.cpp <<'TEXT'
import kahan;
int main() {
    static unsigned short weight[40], grad[40], inline_state[120];
    static unsigned char state[1000];
    auto opt = kopt_adamw(1e-3);
    auto inline_opt = kopt_inline_optimizer_of(1e-3f, 0, 0);
    auto t = kopt_tensor_of(weight, KOPT_BF16, grad, KOPT_BF16, 40, state, sizeof state);
    for (auto &g : grad) g = kopt_bf16_from_f32(1);
    if (kopt_state_init(&opt, &t, 1, nullptr) != KOPT_OK || kopt_optimizer_step(&opt, &t, 1) != KOPT_OK) return 1;
    const float moved = kopt_f32_from_bf16(weight[39]);
    kopt_inline_adamw(&inline_opt, weight, inline_state, grad, 40);
    return !(moved < 0 && kopt_f32_from_bf16(weight[39]) < moved);
}
TEXT
    for level in -O0 -O2; do
        set -- $clang -std=c++20 $level
        "$@" -I. --precompile -o $out/kahan.pcm $out/kahan.cppm >$out/log 2>&1 &&
            "$@" -fmodule-file=kahan=$out/kahan.pcm -o $out/importer $out/importer.cpp $out/kahan.pcm $out/plain.o \
                >$out/log 2>&1 && $out/importer >$out/log 2>&1
        report $? "a module of C++20 exports constructors and inline functions: $*"
    done
else missing "no clang++-19: modules"; fi
echo "1..$count"
[ $failed = 0 ]
