# Sourced by tools/check and tools/test: a run of tests, with a directory of its own, that ends with all that it has started, however it ends.
step() { printf '\n== %s (%s)\n' "$1" "$(date +%H:%M:%S)"; }
note() { printf '%s %s\n' "$(date +%H:%M:%S)" "$*"; }

front=           # the process that in_front waits for
declare -A groups=() # process groups by lane, of those that run beside

# A run starts thousands of short programs. Where the environment forbids Python to keep what it has compiled, each compiles all of kvfs: two fifths
# of what a test with a pool of its own costs.
unset PYTHONDONTWRITEBYTECODE

# begin_run [TOLD]: TOLD is the folder of the files by which tests tell how they ended, LANE.told. It is made anew, and stays after the run.
begin_run() {
    { : <&0; } 2>/dev/null || exec </dev/null
    KVFS_TEST_RUN=$(mktemp -d "$(realpath "${TMPDIR:-/tmp}")/t.XXXX")
    chmod 1777 "$KVFS_TEST_RUN" # as /tmp: some tests are other users
    # pytest's directories too: it ends with an error where another user's run, or a killed one, left something behind.
    export KVFS_TEST_RUN PYTEST_DEBUG_TEMPROOT=$KVFS_TEST_RUN
    # Pools that are to stay lie beside it.
    [ -n "${KVFS_KEEP_POOL:-}" ] || export TMPDIR=$KVFS_TEST_RUN
    told=${1:-$KVFS_TEST_RUN/told}
    rm -rf "$told"
    mkdir -p "$told"
    told=$(realpath "$told") # make goes elsewhere
    began=$SECONDS
    trap end_run EXIT
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 143' TERM
}
end_run() {
    local status=$? lane tests=()
    trap '' HUP INT TERM
    [ $status -lt 128 ] || note "signal $((status - 128)): ending what runs"
    for lane in "${!groups[@]}"; do
        ! kill -TERM -- "-${groups[$lane]}" 2>/dev/null || tests+=("-${groups[$lane]}")
    done
    if [ -n "$front" ]; then
        # A terminal has sent it SIGINT already, and a second signal would disturb its end.
        [ "$status" != 130 ] || sleep 1
        kill -TERM "$front" 2>/dev/null || true
        tests+=("$front")
    fi
    python3 tests/leftovers.py "$KVFS_TEST_RUN" 20 "${tests[@]}" || true
    exit "$status"
}
# As COMMAND alone, but a signal to this script is obeyed at once: bash itself obeys one only after the command.
in_front() {
    local status=0
    "$@" <&0 &
    front=$!
    wait "$front" || status=$?
    front=
    return $status
}
check_style() {
    ruff check .
    ruff format --check --quiet .
    git ls-files -z 'native/*.c' 'native/*.cc' 'native/*.h' | xargs -0 clang-format --dry-run -Werror
    mypy
}
# beside LANE LOG COMMAND...: runs it in a process group of its own; its status goes to TOLD/LANE.status.
beside() {
    local lane=$1 log=$2
    shift 2
    set -m
    (
        export KVFS_TEST_TOLD=$told/$lane.told
        set +e
        (set -e; "$@") >"$log" 2>&1 </dev/null
        echo $? >"$told/$lane.status.new"
        mv "$told/$lane.status.new" "$told/$lane.status"
    ) &
    groups[$lane]=$!
    set +m
}
# counts_of LANE|'*'
counts_of() {
    cat "$told"/$1.told 2>/dev/null | awk -F '\t' '{ count[$1]++ }
        END { printf "%d passed, %d failed, %d skipped", count["passed"], count["failed"], count["skipped"] }'
}
# Names those that have failed since it was last asked.
declare -A shown=()
tell_failures() {
    local file lane count
    for file in "$told"/*.told; do
        [ -e "$file" ] || continue
        lane=$(basename "$file" .told)
        count=$(grep -c '^failed' "$file") || continue
        if [ "$count" -gt "${shown[$lane]:-0}" ]; then
            grep '^failed' "$file" | tail -n "+$((${shown[$lane]:-0} + 1))" | while IFS=$'\t' read -r _ name reason; do
                note "FAILED (lane $lane) $name: $reason"
            done
            shown[$lane]=$count
        fi
    done
}
# Reasons of skips, with how many tests each kept out; then the names of failed tests, and the counts.
tell_all() {
    local file
    step "not exercised on this machine"
    cat "$told"/*.told 2>/dev/null | awk -F '\t' '$1 == "skipped" { count[$3]++ } END { for (why in count) printf "%5d skipped: %s\n", count[why], why }' | sort -k 3 |
        grep . || echo "nothing: no test was skipped"
    step "in all, $((SECONDS - began)) s"
    for file in "$told"/*.told; do
        [ ! -e "$file" ] || echo "$(basename "$file" .told): $(counts_of "$(basename "$file" .told)")"
    done
    echo "together: $(counts_of '*')"
    cat "$told"/*.told 2>/dev/null | awk -F '\t' '$1 == "failed" { print "FAILED " $2 ": " $3 }'
}
