#!/usr/bin/env bash
# Compares the list of allowed system calls with those that `jackstay run` makes in tests.
#
#   tests/sandbox/trace.sh [TEST-BINARY...]     default: takeover, sandbox and secrets, built by `cargo test --no-run`
#
# It needs strace. The exit code is 1 if a call was made that the list lacks. Calls of the list that were not made are
# printed too: src/net/process/sandbox/system_calls.rs has the reason for each.
set -euo pipefail
cd "$(dirname "$0")/../.."

list=src/net/process/sandbox/system_calls.rs
newest() { find target/debug/deps -maxdepth 1 -name "$1-*" -executable -type f -printf '%T@ %p\n' | sort -rn | head -1 | cut -d' ' -f2; }
if (($# == 0)); then
    set -- "$(newest takeover)" "$(newest sandbox)" "$(newest secrets)"
fi
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT

# A process counts from the filter that it installs. Its threads follow it.
for binary in "$@"; do
    strace -ff -qq -s 64 -e signal=none -o "$dir/$(basename "$binary")" "$binary" --test-threads 2 >"$dir/log" 2>&1 ||
        { cat "$dir/log"; exit 1; }
done
threads_of() { sed -nE 's/^clone3?\(.*CLONE_THREAD.* = ([0-9]+)$/\1/p' "$1"; }
: >"$dir/made"
add() { # FILE: the calls of a thread, and of the threads that it starts
    local file=$1 thread
    sed -nE 's/^([a-z0-9_]+)\(.*/\1/p' "$file" >>"$dir/made"
    for thread in $(threads_of "$file"); do
        [[ -e ${1%.*}.$thread ]] && add "${1%.*}.$thread"
    done
}
for file in $(grep -lE '^seccomp\(SECCOMP_SET_MODE_FILTER.* = 0$' "$dir"/*.[0-9]*); do
    sed -n '/^seccomp(SECCOMP_SET_MODE_FILTER/,$p' "$file" | tail -n +2 >"$file.after"
    cp "$file.after" "$file"
    rm "$file.after"
    add "$file"
done

sort -u "$dir/made" | grep -vx clone3 >"$dir/calls"
grep -oE '^ +SYS_[a-z0-9_]+' "$list" | sed 's/.*SYS_//' | sort -u >"$dir/allowed"
[[ -s $dir/calls ]] || { echo "no process installed the filter"; exit 1; }
echo "made and allowed: $(comm -12 "$dir/calls" "$dir/allowed" | tr '\n' ' ')"
echo "allowed, not made: $(comm -13 "$dir/calls" "$dir/allowed" | tr '\n' ' ')"
missing=$(comm -23 "$dir/calls" "$dir/allowed" | tr '\n' ' ')
echo "made, not allowed: ${missing:-none}"
[[ -z $missing ]]
