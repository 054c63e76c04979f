# Trains 1000 weights from Rust, Go, C# and LuaJIT, as far as their compilers are here: all must print the same bits.
#
#     sh docs/examples/languages/run.sh
#
# kopt_optimizer_init() refuses structs of another size. The library, made by python/bindings.py, also has
# kopt_layout_of(): each program asks it whether fields are where its own declarations have them. Go reads the header
# itself.
set -eu
cd "$(dirname "$0")/../../.."
out=$PWD/build/examples/languages here=docs/examples/languages
mkdir -p "$out"
have() { command -v "$1" >/dev/null 2>&1 || { echo "$2 is left out: there is no $1" && false; }; }
python3 docs/examples/python/bindings.py kahan_opt.h "$out" >/dev/null
${CC:-cc} -shared -fPIC -O2 -I. -o "$out/libkahan_opt.so" "$out/kahan_opt.c"
: >"$out/said"
run() { LD_LIBRARY_PATH=$out "$@" >"$out/line" && tee -a "$out/said" <"$out/line"; }
if have rustc Rust; then
    rustc --edition 2021 -O -L "$out" -l kahan_opt -o "$out/rust" $here/train.rs
    run "$out/rust"
fi
if have go Go; then
    GOCACHE=$out/cache CGO_CFLAGS=-I$PWD go build -o "$out/go" $here/train.go
    run "$out/go"
fi
if have mcs C#; then
    mcs -unsafe -out:"$out/train.exe" $here/Train.cs
    run mono "$out/train.exe"
fi
if have luajit LuaJIT; then run luajit $here/train.lua "$out/libkahan_opt.so"; fi
bits=$(cut -c 8- "$out/said" | sort -u | wc -l)
[ "$bits" -le 1 ] || { echo "the bits differ"; exit 1; }
