#!/bin/sh
# docs/playground/run.sh [build | test | picture | lacks]: the playground compiled to WebAssembly, in build/web, and
# served; `test` and `picture` open it in headless Chromium, and `lacks` says what they need and this machine has not.
#
# Only lists of words are unquoted: CC and flags.
# shellcheck disable=SC2086,SC2154
set -eu
cd "$(dirname "$0")/../.."
CC=${CC:-cc}
have() { command -v "$1" >/dev/null 2>&1; }

build() { # build FLAG...: with these flags in addition
    rm -rf build/web
    mkdir -p build/web
    cp docs/playground/*.html docs/playground/*.css docs/playground/*.js kahan_opt.h build/web
    for code in scalar simd128; do
        simd= && [ $code = scalar ] || simd=-msimd128
        clang --target=wasm32 -std=c99 -O2 $simd "$@" -mbulk-memory -nostdlib -fuse-ld=lld \
            -Wl,--no-entry,--strip-all -o build/web/$code.wasm docs/playground/playground.c
    done
    $CC -std=c99 -O2 -ffp-contract=off "$@" -o build/playground docs/playground/playground.c
    build/playground >build/web/native.json
}
lacks() {
    {
        for tool in clang wasm-ld chromium chromedriver; do have $tool || echo $tool; done
        for module in selenium PIL; do
            /usr/bin/python3 -c "import $module" 2>/dev/null || echo "$module for Python"
        done
    } | paste -s -d , - | sed 's/,/, /g'
}

case "${1:-}" in
lacks) lacks ;;
test | picture)
    lacking=$(lacks)
    [ -z "$lacking" ] || { echo "1..0 # SKIP no $lacking; ./build.sh setup installs it"; exit 0; }
    . tests/tap.sh
    build $warnings
    exec /usr/bin/python3 tests/examples/web.py "$1"
    ;;
*)
    for tool in clang wasm-ld; do
        have $tool || { echo "build.sh: web needs $tool (./build.sh setup installs it)" >&2; exit 2; }
    done
    build
    echo "build/web has the page and what it loads; any web server can serve it"
    [ "${1:-}" = build ] || exec python3 -m http.server "${PORT:-8000}" --bind 127.0.0.1 --directory build/web
    ;;
esac
