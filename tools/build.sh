#!/usr/bin/env bash
# build.sh TARGET... - installs what is missing, configures BUILD and builds the targets.
#
#   BUILD             build folder (build)
#   FP8GEN_SANITIZE   address,undefined or thread
#   FP8GEN_CMAKE      further arguments for cmake
#   FP8GEN_NO_BUILD   1: do nothing, the folder was built elsewhere
#
# Exit codes: 0 done, 1 the build failed, 3 the machine lacks something (the message says what).
# Runs without questions. Packages are installed when this is root, or sudo asks for no password;
# otherwise the exact command is printed.
set -u
cd "$(dirname "$0")/.." || exit 1
build=${BUILD:-build}
[ "${FP8GEN_NO_BUILD:-0}" = 1 ] && exit 0

# command or pkg-config module, and the Debian package that has it
missing_packages() {
    local missing=()
    { command -v cc && command -v make; } >/dev/null 2>&1 || missing+=(build-essential)
    command -v cmake >/dev/null 2>&1 || missing+=(cmake)
    command -v ninja >/dev/null 2>&1 || missing+=(ninja-build)
    command -v pkg-config >/dev/null 2>&1 || missing+=(pkg-config)
    local pair
    for pair in lua5.4:liblua5.4-dev jansson:libjansson-dev libxxhash:libxxhash-dev \
        cmocka:libcmocka-dev; do
        pkg-config --exists "${pair%%:*}" 2>/dev/null || missing+=("${pair##*:}")
    done
    echo "${missing[*]}"
}

install_packages() {
    local packages=$1
    local command="apt-get update && apt-get install -y --no-install-recommends $packages"
    local as_root=()
    if ! command -v apt-get >/dev/null 2>&1; then
        echo "missing: $packages (Debian's names)." \
            "Install them with this system's package manager." >&2
        exit 3
    fi
    if [ "$(id -u)" != 0 ]; then
        if command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
            as_root=(sudo -n)
        else
            echo "missing packages: $packages. As root:" >&2
            echo "    $command" >&2
            exit 3
        fi
    fi
    echo "installing $packages" >&2
    if ! { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq update &&
        "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq install -y \
            --no-install-recommends $packages </dev/null >/dev/null; }; then
        echo "could not install the packages. By hand, as root:" >&2
        echo "    $command" >&2
        exit 3
    fi
}

missing=$(missing_packages)
if [ -n "$missing" ]; then
    install_packages "$missing"
    missing=$(missing_packages)
    if [ -n "$missing" ]; then
        echo "still missing after the installation: $missing" >&2
        exit 3
    fi
fi

mkdir -p "$build" || exit 3
log=$build/configure.log
# A folder keeps the generator it began with.
generator=()
[ -f "$build/CMakeCache.txt" ] || generator=(-G Ninja)
if ! cmake -S . -B "$build" "${generator[@]}" -DFP8GEN_SANITIZE="${FP8GEN_SANITIZE:-}" \
    ${FP8GEN_CMAKE:-} >"$log" 2>&1; then
    if grep -q 'No CUDA toolkit\|is too old' "$log"; then
        sed -n '/No CUDA toolkit\|is too old/,/^Call Stack/p' "$log" |
            grep -v '^Call Stack\|^ *$' >&2
        exit 3
    fi
    cat "$log" >&2
    exit 1
fi
jobs=$(nproc 2>/dev/null || echo 2)
targets=()
for target in "$@"; do targets+=(--target "$target"); done
echo "building $* in $build" >&2
if ! cmake --build "$build" -j "$jobs" "${targets[@]}" >"$build/build.log" 2>&1; then
    grep -v '^\[[0-9]*/[0-9]*\] \(Building\|Linking\|Creating\|Embedding\|Re-\)' \
        "$build/build.log" >&2
    exit 1
fi
