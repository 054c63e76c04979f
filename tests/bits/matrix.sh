# matrix.sh: builds and runs the probe (probe.c) in every cell (architecture, compiler, flags, instruction set) that
# this machine supports. Each must print golden.txt. Prints TAP and writes build/matrix/table.md, the table of
# docs/same-bits.md.
#     sh tests/bits/matrix.sh          all, two at a time
#     sh tests/bits/matrix.sh turn     those whose turn it is, as ./build.sh test does
#     sh tests/bits/matrix.sh N...     only these lines of the list
#     sh tests/bits/matrix.sh list     the builds, numbered
#     sh tests/bits/matrix.sh missing  the tools that are missing here
out=build/matrix
zig=build/zig/ziglang/zig
export ZIG_GLOBAL_CACHE_DIR=build/zig-cache ZIG_LOCAL_CACHE_DIR=build/zig-cache # a C library for each target

# cell RUNNER ARCHITECTURE PATHS COMPILER FLAG...: one build. RUNNER is native, an emulator, or a name in run().
# PATHS lists its runs: `isas` (forces each usable instruction set), `ftz` (the same, and the caller flushes subnormals
# and rounds toward zero), `-` (the only path), CPU=ISA (forces nothing, on that emulated processor, where ISA must be
# the best path).

cells() {
    for c in gcc clang clang-19; do
        lld= && [ $c = gcc ] || lld=-fuse-ld=lld
        cell native x86-64 'isas' $c -O0
        cell native x86-64 'isas' $c -O1
        cell native x86-64 'isas ftz' $c -O2
        cell native x86-64 'isas' $c -O3
        cell native x86-64 'isas' $c -Os
        cell native x86-64 'isas' $c -Ofast
        cell native x86-64 'isas ftz' $c -Ofast -march=native
        cell native x86-64 'isas' $c -O3 -ffp-contract=fast -march=native -DKAHAN_OPT_ALL_ISAS
        cell native x86-64 'isas' $c -Ofast -flto $lld
        cell native i386 'isas' $c -m32 -O2
        cell native i386 'isas ftz' $c -m32 -Ofast
        cell native i386 'isas ftz' $c -m32 -O2 -mno-sse
        cell native i386 'isas' $c -m32 -O2 -msse2 -mfpmath=sse
    done
    cell native x86-64 'isas ftz' gcc -Ofast -mfpmath=387
    cell native i386 'isas ftz' gcc -m32 -Ofast -mno-sse -mfpmath=387
    cell native i386 'isas' gcc -m32 -O0 -mno-sse -mfpmath=387
    # Estimates for divisions and roots, constants cut to fp32, both units at once, and what one flag must not hide.
    scalar=-DKAHAN_OPT_NO_SIMD
    cell native x86-64 'isas ftz' gcc -Ofast -mrecip=all -mfpmath=both -fsingle-precision-constant
    cell native x86-64 'isas ftz' gcc -O2 -mfpmath=both -frounding-math -fsignaling-nans -fshort-enums $scalar
    cell native x86-64 'isas' clang-19 -Ofast -mrecip=all $scalar
    cell native x86-64 'isas ftz' clang-19 -O2 -ffp-eval-method=extended -fdenormal-fp-math=positive-zero $scalar
    for c in g++ clang++ clang++-19; do
        cell native x86-64 'isas' $c -x c++ -O2
        cell native x86-64 'isas' $c -x c++ -std=c++98 -Ofast
    done
    cell native x86-64 'isas ftz' clang-19 -O2 -march=haswell -mno-evex512
    cell native x86-64 'isas ftz' tcc
    cell native x86-64 'isas' musl-gcc -static -O2
    cell native x86-64 'isas' musl-gcc -static -Ofast
    cell wine windows 'isas ftz' x86_64-w64-mingw32-gcc -O2
    cell wine windows 'isas' x86_64-w64-mingw32-gcc -Ofast -march=native

    # Dispatch: one program with all paths, on old and new processors. None may crash.
    cell qemu-x86_64 x86-64 'qemu64=sse2 core2duo=sse2 Nehalem=sse2 Haswell=avx2 max=avx2' gcc -O2 -static
    cell qemu-x86_64 x86-64 'Haswell=avx2' gcc -O2 -static -march=haswell
    cell qemu-i386 i386 'pentium2=scalar pentium3=scalar coreduo=sse2 Haswell=avx2' gcc -m32 -O2 -static -mno-sse
    cell qemu-aarch64 aarch64 'cortex-a53=neon cortex-a72=neon max=neon' aarch64-linux-gnu-gcc -O2 -static

    cell qemu-aarch64 aarch64 'isas' aarch64-linux-gnu-gcc -static -O0
    cell qemu-aarch64 aarch64 'isas ftz' aarch64-linux-gnu-gcc -static -O2
    cell qemu-aarch64 aarch64 'isas' aarch64-linux-gnu-gcc -static -Os
    cell qemu-aarch64 aarch64 'isas' aarch64-linux-gnu-gcc -static -O3 -ffp-contract=fast
    cell qemu-aarch64 aarch64 'isas ftz' aarch64-linux-gnu-gcc -static -Ofast
    cell qemu-aarch64 aarch64 'isas' aarch64-linux-gnu-gcc -static -Ofast -march=armv8.2-a+fp16+sve
    cell qemu-aarch64 aarch64 'isas' aarch64-linux-gnu-gcc -static -Ofast -mlow-precision-div $scalar
    cell qemu-arm armv7 'isas' arm-linux-gnueabihf-gcc -static -O1
    cell qemu-arm armv7 'isas ftz' arm-linux-gnueabihf-gcc -static -O2
    cell qemu-arm armv7 'isas' arm-linux-gnueabihf-gcc -static -O3 -ffp-contract=fast -mfpu=neon-vfpv4
    cell qemu-arm armv7 'isas ftz' arm-linux-gnueabihf-gcc -static -Ofast -mfpu=neon-vfpv4
    cell qemu-riscv64 riscv64 'isas ftz' riscv64-linux-gnu-gcc -static -O2
    cell qemu-riscv64 riscv64 'isas' riscv64-linux-gnu-gcc -static -O3 -ffp-contract=fast
    cell qemu-riscv64 riscv64 'isas' riscv64-linux-gnu-gcc -static -Ofast
    cell qemu-s390x s390x 'isas ftz' s390x-linux-gnu-gcc -static -O2
    cell qemu-s390x s390x 'isas' s390x-linux-gnu-gcc -static -O3 -ffp-contract=fast
    cell qemu-s390x s390x 'isas' s390x-linux-gnu-gcc -static -Ofast -march=z14
    cell qemu-ppc powerpc 'isas ftz' powerpc-linux-gnu-gcc -static -O2
    cell qemu-ppc powerpc 'isas' powerpc-linux-gnu-gcc -static -Ofast
    cell qemu-ppc64le ppc64le 'isas ftz' powerpc64le-linux-gnu-gcc -static -O2
    cell qemu-ppc64le ppc64le 'isas' powerpc64le-linux-gnu-gcc -static -O3 -ffp-contract=fast
    cell qemu-ppc64le ppc64le 'isas ftz' powerpc64le-linux-gnu-gcc -static -Ofast -mcpu=power9
    cell qemu-mips mips 'isas ftz' mips-linux-gnu-gcc -static -O2
    cell qemu-mips mips 'isas' mips-linux-gnu-gcc -static -Ofast
    for c in clang clang-19; do
        cell qemu-aarch64 aarch64 'isas' $c --target=aarch64-linux-gnu -static -O2
        cell qemu-aarch64 aarch64 'isas' $c --target=aarch64-linux-gnu -static -Ofast -ffp-contract=fast
        cell qemu-arm armv7 'isas' $c --target=arm-linux-gnueabihf -static -Ofast -mfpu=neon-vfpv4
        cell qemu-riscv64 riscv64 'isas' $c --target=riscv64-linux-gnu -march=rv64gc -static -Ofast
        cell qemu-s390x s390x 'isas' $c --target=s390x-linux-gnu -static -Ofast -march=z13
        cell qemu-ppc64le ppc64le 'isas' $c --target=powerpc64le-linux-gnu -static -Ofast
    done

    # No operating system and no libc: bare.c.
    m0='-mthumb -mcpu=cortex-m0plus'
    m3='-mthumb -mcpu=cortex-m3'
    m4f='-mthumb -mcpu=cortex-m4 -mfloat-abi=hard -mfpu=fpv4-sp-d16'
    m7='-mthumb -mcpu=cortex-m7 -mfloat-abi=hard -mfpu=fpv5-d16'
    m33='-mthumb -mcpu=cortex-m33 -mfloat-abi=hard -mfpu=fpv5-sp-d16'
    m55='-mthumb -mcpu=cortex-m55 -mfloat-abi=hard'
    gcc=arm-none-eabi-gcc
    cell mps2-an385 cortex-m0+ '-' $gcc -Os $m0
    cell mps2-an385 cortex-m0+ '-' $gcc -Ofast $m0
    cell mps2-an385 cortex-m3 '-' $gcc -Os $m3
    cell mps2-an385 cortex-m3 '-' $gcc -Ofast $m3
    cell mps2-an386 cortex-m4f '-' $gcc -Os $m4f
    cell mps2-an386 cortex-m4f '-' $gcc -O2 -ffp-contract=fast -fsingle-precision-constant $m4f
    cell mps2-an386 cortex-m4f '-' $gcc -Ofast $m4f
    cell mps2-an386 cortex-m4f '-' $gcc -O2 -DPROBE_FTZ $m4f
    cell mps2-an500 cortex-m7 '-' $gcc -Os $m7
    cell mps2-an500 cortex-m7 '-' $gcc -Ofast $m7
    cell mps2-an505 cortex-m33 '-' $gcc -Os $m33
    cell mps2-an505 cortex-m33 '-' $gcc -Ofast $m33
    cell mps3-an547 cortex-m55 '-' $gcc -Ofast $m55
    clang='clang-19 --target=arm-none-eabi'
    cell mps2-an385 cortex-m0+ '-' $clang -Ofast $m0
    cell mps2-an386 cortex-m4f '-' $clang -Ofast $m4f
    cell mps2-an386 cortex-m4f '-' $clang -Oz $m4f
    for c in clang clang-19; do
        cell wasm wasm32 'isas' $c --target=wasm32 -O2
        cell wasm wasm32 'isas' $c --target=wasm32 -O2 -msimd128
        cell wasm wasm32 'isas' $c --target=wasm32 -Ofast -msimd128
    done
    cell wasm wasm32 'isas' clang-19 --target=wasm32 -O0 -msimd128
    cell wasm wasm32 'isas' clang-19 --target=wasm32 -O3 -ffp-contract=fast -msimd128 -mrelaxed-simd

    # With -O0, as without -O, zig cc adds -fsanitize=undefined, which stops the program.
    cell native x86-64 'isas' $zig cc -target x86_64-linux-musl -O0
    cell native x86-64 'isas ftz' $zig cc -target x86_64-linux-musl -O2
    cell wine windows 'isas' $zig cc -target x86_64-windows-gnu -O2
    cell qemu-aarch64 aarch64 'isas ftz' $zig cc -target aarch64-linux-musl -O2
    cell qemu-riscv64 riscv64 'isas ftz' $zig cc -target riscv64-linux-musl -O2
    cell qemu-loongarch64 loongarch64 'isas ftz' $zig cc -target loongarch64-linux-musl -O0
    cell qemu-loongarch64 loongarch64 'isas ftz' $zig cc -target loongarch64-linux-musl -Ofast
    cell wasm wasm32 'isas' $zig cc -target wasm32-freestanding -O2
    cell wasm wasm32 'isas' $zig cc -target wasm32-freestanding -Ofast -msimd128
}

needs() { # needs RUNNER ARCHITECTURE PATHS COMPILER FLAG...: the tools it needs, one per line
    case $1 in
    native) ;;
    wine) echo /usr/lib/wine/wine64 ;;
    mps*) printf '%s\n' qemu-system-arm arm-none-eabi-gcc ;;
    wasm) echo node ;;
    *) echo "$1" ;;
    esac
    echo "$4"
    case "$*" in
    *-m32*) echo gcc-12-multilib ;;
    *--target=*-linux-*) echo "$*" | sed 's/.*--target=\([^ ]*\).*/\1-gcc/' ;;
    *--target=wasm* | *' clang'*-flto*) echo "$4" | sed 's/clang/ld.lld/' ;;
    esac
}

have() { # have NAME, one that needs() prints: is it installed?
    case $1 in
    gcc-12-multilib) echo 'int main(void) { return 0; }' | gcc -m32 -x c -o /dev/null - 2>/dev/null ;;
    *) command -v "$1" >/dev/null 2>&1 ;;
    esac
}

# ---- one build -------------------------------------------------------------------------------------------------------

compile() { # compile RUNNER PROGRAM COMPILER FLAG...
    runner=$1 program=$2
    shift 2
    case $runner in
    mps*)
        origin=0x00000000 ram=0x20000000
        [ "$runner" = mps2-an505 ] && origin=0x10000000 ram=0x38000000
        cat >"$program.ld" <<EOF
MEMORY { rom (rx) : ORIGIN = $origin, LENGTH = 480K  ram (rwx) : ORIGIN = $ram, LENGTH = 480K }
SECTIONS {
    .text : { KEEP(*(.vectors)) *(.text*) *(.rodata*) } >rom
    .data : { *(.data*) } >ram
    .bss : { *(.bss*) *(COMMON) } >ram
    /DISCARD/ : { *(.ARM.*) }
    stack_top = ORIGIN(ram) + LENGTH(ram);
}
EOF
        "$@" -ffreestanding -c -o "$program.o" tests/bits/bare.c || return
        machine=
        for word; do case $word in -mthumb | -mcpu* | -mf*) machine="$machine $word" ;; esac; done
        arm-none-eabi-gcc $machine -nostdlib -T "$program.ld" -o "$program" "$program.o" -lgcc
        ;;
    wasm) "$@" -ffreestanding -nostdlib -Wl,--no-entry -fuse-ld=lld -o "$program" tests/bits/bare.c ;;
    wine) "$@" -o "$program.exe" tests/bits/probe.c && mv "$program.exe" "$program" ;; # MinGW insists on .exe
    *) "$@" -o "$program" tests/bits/probe.c ;;
    esac
}

run() { # run RUNNER PROGRAM ARGUMENT...
    runner=$1
    shift
    case $runner in
    native) timeout 60 "$@" ;;
    wine) WINEPREFIX=$PWD/$out/wine WINEDEBUG=-all timeout 100 /usr/lib/wine/wine64 "$@" 2>/dev/null | tr -d '\r' ;;
    mps*)
        timeout 100 qemu-system-arm -M "$runner" -nographic -monitor none -serial none -chardev stdio,id=out \
            -semihosting-config enable=on,target=native,chardev=out -kernel "$1"
        ;;
    wasm)
        timeout 100 node -e 'const fs = require("fs"), code = new WebAssembly.Module(fs.readFileSync(process.argv[1]));
            const text = start => {
                const bytes = new Uint8Array(program.exports.memory.buffer);
                let end = start;
                while (bytes[end]) end++;
                return Buffer.from(bytes.slice(start, end)).toString();
            };
            const put = start => process.stdout.write(text(start));
            const program = new WebAssembly.Instance(code, {env: {put}}), names = [];
            for (let name; name = program.exports.usable(names.length); ) names.push(text(name));
            if (process.argv[2] === "isas") console.log(names.filter(name => name).join("\n"));
            else program.exports.run(names.indexOf(process.argv[2]))' "$@"
        ;;
    *) timeout 100 $runner "$@" ;; # two words: an emulator and its processor
    esac
}

version_of() { # version_of COMPILER: "gcc 12.2.0"
    case $1 in
    tcc) tcc -v | sed 's/ version//; s/ (.*//' ;;
    *zig) echo "zig $($1 version)" ;;
    *clang*) echo "${1%-*} $($1 --version | sed -n 's/.*clang version \([0-9.]*\).*/\1/p')" ;;
    *g++*) echo "g++ $($1 -dumpfullversion)" ;;
    musl-gcc) echo "gcc $($1 -dumpfullversion), musl" ;;
    *) echo "gcc $($1 -dumpfullversion 2>/dev/null || $1 -dumpversion)" ;;
    esac
}

check() { # check LABEL RUNNER PROGRAM ARGUMENT...: one cell
    label=$1
    shift
    run "$@" >"$program.out" 2>"$program.err"
    status=$?
    hash=$(sed -n 's/^all //p' "$program.out")
    if [ $status = 0 ] && cmp -s "$program.out" tests/bits/golden.txt; then
        good=ok
    else
        good='not ok'
    fi
    echo "$good - $architecture, $version, $flags: $label"
    if [ "$good" != ok ]; then
        echo "# exit status $status"
        diff tests/bits/golden.txt "$program.out" | grep '^[<>]' | head -6 | sed 's/^/# /'
        head -3 "$program.err" | sed 's/^/# /'
    fi
    printf '%s\t%s\t%s\t%s\t%s\n' "$architecture" "$version" "$flags" "$label" "${hash:-none}" >>"$program.rows"
}

build() { # build RUNNER ARCHITECTURE PATHS COMPILER FLAG...
    for tool in $(needs "$@"); do
        have "$tool" || { echo "ok - $2, $4 $5 # SKIP no $tool"; return; }
    done
    runner=$1 architecture=$2 paths=$3 compiler=$4
    shift 4
    version=$(version_of "$compiler")
    flags=$(echo "$*" | sed 's/^cc //; s/--*target[= ][^ ]* *//; s/-x c++ *//; s/-static *//; s/-D//')
    if ! compile "$runner" "$program" "$compiler" "$@" 2>"$program.err"; then
        echo "not ok - $architecture, $version, $flags: builds"
        head -5 "$program.err" | sed 's/^/# /'
        return
    fi
    for path in $paths; do
        case $path in
        -) check scalar "$runner" "$program" ;;
        isas) for isa in $(run "$runner" "$program" isas); do check "$isa" "$runner" "$program" "$isa"; done ;;
        ftz) for isa in $(run "$runner" "$program" isas); do check "$isa/ftz" "$runner" "$program" "$isa" ftz; done ;;
        *=*)
            best=$(run "$runner -cpu ${path%=*}" "$program" isas | tail -1)
            [ "$best" = "${path#*=}" ] || best="not ok: $best is the best path"
            check "${path%=*}: $best" "$runner -cpu ${path%=*}" "$program"
            ;;
        esac
    done
    [ -s "$program.rows" ] || echo "not ok - $architecture, $version, $flags: runs"
    rm -f "$program" "$program".o "$program".pdb
}

# ---- all -------------------------------------------------------------------------------------------------------------

number=0
case ${1:-} in
build)
    wanted=$2
    cell() {
        number=$((number + 1))
        [ $number != "$wanted" ] || build "$@" >"$program.tap" 2>&1
    }
    program=$out/$wanted
    cells
    exit 0
    ;;
list)
    cell() { number=$((number + 1)) && echo "$number $*"; }
    cells
    exit
    ;;
missing)
    cell() { needs "$@"; }
    for tool in $(cells | sort -u); do have "$tool" || echo "$tool"; done
    exit 0
    ;;
turn)
    . tests/tap.sh
    cell() { number=$((number + 1)) && ! turn 8 || echo $number; }
    set -- $(cells)
    ;;
'') set -- $(sh "$0" list | cut -d ' ' -f 1) ;;
esac

rm -rf $out
mkdir -p $out
echo "$@" | xargs -n 1 -P 2 sh "$0" build
if [ -d $out/wine ]; then # 700 MB
    WINEPREFIX=$PWD/$out/wine /usr/lib/wine/wineserver -k
    rm -rf $out/wine
fi

for number in "$@"; do [ ! -f $out/"$number".rows ] || cat $out/"$number".rows; done |
    awk -F '\t' '
        function add(list, word, between) {
            if (index(between list between, between word between)) return list
            return list == "" ? word : list between word
        }
        { # a row for each architecture and hash; of a path the instruction set, without the emulated processor
            key = $1 FS $5
            if (!(key in compilers)) order[++n] = key
            sub(/.*: /, "", $4)
            compilers[key] = add(compilers[key], $2, ", ")
            paths[key] = add(paths[key], $4, ", ")
        }
        END {
            for (i = 1; i <= n; i++) { # one row for what differs in nothing but the architecture
                split(order[i], of, FS)
                row = compilers[order[i]] " | " paths[order[i]] " | " of[2]
                if (!(row in names)) rows[++m] = row
                names[row] = add(names[row], of[1], ", ")
            }
            print "| architecture | compilers | instruction sets | all |\n|---|---|---|---|"
            for (i = 1; i <= m; i++) print "| " names[rows[i]] " | " rows[i] " |"
        }' >$out/table.md

for number in "$@"; do cat $out/"$number".tap; done |
    awk '/^(not )?ok / { n++; sub(/ok/, "ok " n) } { print } END { print "1.." n }'
