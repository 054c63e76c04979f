# Builds app/main.c in three ways: by FetchContent, by find_package from an installed copy, and by pkg-config.
#     sh docs/examples/cmake/run.sh [FLAG...]     flags for CMake, such as -DKAHAN_OPT_VMATH=ON
set -eu
cd "$(dirname "$0")"
root=$(cd ../../.. && pwd)
out=$root/build/examples/cmake
command -v cmake >/dev/null || { echo "cmake: SKIPPED, no cmake (./build.sh setup installs it)"; exit 0; }
rm -rf "$out"
mkdir -p "$out"
quietly() { "$@" >"$out/log" 2>&1 || { cat "$out/log" >&2; exit 1; }; }
CC=${CC:-cc}
export CC

# FetchContent of this checkout in place of a download
quietly cmake -S app -B "$out/fetch" "-DFETCHCONTENT_SOURCE_DIR_KAHAN_OPT=$root" \
    -DCMAKE_DISABLE_FIND_PACKAGE_kahan_opt=ON "$@"
quietly cmake --build "$out/fetch"
echo "FetchContent: $("$out/fetch/app")"

quietly cmake -S . -B "$out/package" "-DCMAKE_INSTALL_PREFIX=$out/installed" -DCMAKE_INSTALL_LIBDIR=lib "$@"
quietly cmake --build "$out/package"
quietly cmake --install "$out/package"
quietly cmake -S app -B "$out/find" "-DCMAKE_PREFIX_PATH=$out/installed"
quietly cmake --build "$out/find"
echo "find_package: $("$out/find/app")"

command -v pkg-config >/dev/null || { echo "pkg-config: SKIPPED, no pkg-config"; exit 0; }
export PKG_CONFIG_PATH="$out/installed/lib/pkgconfig"
quietly $CC -o "$out/app" app/main.c $(pkg-config --cflags --libs kahan_opt)
echo "pkg-config:   $("$out/app"), $(pkg-config --modversion kahan_opt)"
