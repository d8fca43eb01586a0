#!/usr/bin/env bash
# What is claimed of a GPU, measured on a rented one in minutes (docs/benchmarks, "On a rented GPU").
#
#   scripts/h200_measure.sh site [FOLDER]       here: packages that the machine lacks, into .carry
#   scripts/h200_measure.sh parts FILE FOLDER   here: a file in parts of 33 MB, to be joined there with cat
#   scripts/h200_measure.sh run MODEL PROMPTS OUT [STAGE...]   there: the stages, all of them unless some are named
#
# MODEL: a folder, or a GGUF file, which is written out as a folder in bfloat16 first. PROMPTS: JSONL in Spec-Bench's
# form. OUT: a folder. Each stage has a time limit, and STAGE_LIMIT=SECONDS (SPEED_LIMIT=60) another one:
#   speed     24 first turns one at a time, from the first request on: tokens/s, ratios, least prompt, equal texts
#   batches   the same of 4, 16, 64 and 256 at once
#   serve     over HTTP, 1, 8, 32 and 128 streams, and which share of the library's speed that is (h200_serve.sh)
#   shape8b   an 8B shape: share of the copy's bandwidth and host time of plain steps at 1 and 64, passes by their rows
#   oracle8b  the same shape: drafts right 8 times of 10, length 5, against plain decoding, at 1 and 64
#   eagle8b   the same shape: what a draft of 5 of an EAGLE head takes (scripts/round_cost.py)
# OUT has STAGE.log as it is written, and results.tgz with all reports, renewed every 10 s: what a run that is killed
# had is there. Exit code 1: a stage failed. DRAFTS (of speed and batches), SERVE_DRAFTS, BENCH_OPTIONS (of speed and
# batches), SERVE_OPTIONS, ROUND_OPTIONS: "ngram medusa eagle eagle:tree=16 auto", "eagle:tree=16", none. DEVICE: cuda.
# SITE: packages for PYTHONPATH, .carry/site. PYTHON: which one, and its version for `site` PYTHON_VERSION, 3.12.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
STAGES=(speed batches serve shape8b oracle8b eagle8b)
PART=33000000 # bytes: with the working tree (22 MB) a call then carries less than 64 MiB
PACK_EVERY=10 # seconds: a machine that is taken back loses at most as much

fail() { echo "h200_measure: $*" >&2 && exit 2; }

# Seconds of a stage. Modes load in up to 60 s where Triton has compiled nothing; a round of all batches takes some 20.
limit() {
    local name=${1^^}_LIMIT
    case $1 in
    speed) echo "${!name:-150}" ;;
    batches) echo "${!name:-240}" ;;
    serve) echo "${!name:-180}" ;;
    *) echo "${!name:-60}" ;;
    esac
}

site() { # FOLDER: site, and extra/click beside it
    local folder=$1 wheels
    wheels=$(mktemp -d)
    # shellcheck disable=SC2064
    trap "rm -rf '$wheels'" EXIT
    "$python" -m pip download --quiet --python-version "${PYTHON_VERSION:-3.12}" --platform manylinux2014_x86_64 \
        --platform manylinux_2_28_x86_64 --only-binary=:all: -d "$wheels" -c "$here/constraints.txt" \
        fastapi uvicorn httptools prometheus_client httpx
    "$python" -m pip download --quiet --no-deps --only-binary=:all: -d "$wheels" -c "$here/constraints.txt" gguf
    rm -rf "$folder/site" "$folder/extra"
    mkdir -p "$folder/site" "$folder/extra/click"
    "$python" - "$wheels" "$folder" <<'PYTHON'
import pathlib, sys, zipfile

wheels, folder = map(pathlib.Path, sys.argv[1:])
for wheel in sorted(wheels.glob("*.whl")):
    into = folder / ("extra/click" if wheel.name.startswith("click-") else "site")
    zipfile.ZipFile(wheel).extractall(into)
PYTHON
    rm -rf "$folder"/site/gguf/scripts "$folder"/site/*/.agents
    find "$folder" \( -name '*.pyx' -o -name '*.pxd' -o -name '*.c' -o -name '*.pyi' \) -delete
    ! command -v strip >/dev/null || find "$folder" -name '*.so' -exec strip --strip-unneeded {} +
    find "$folder" -type f -printf '%s\n' | awk -v at="$folder" '{ n += $1 } END { printf "%.1f MB in %s\n", n / 1e6, at }'
}

as_folder() { # the model, written out in bfloat16; the package that reads its blocks may be in SITE
    local folder=$work/model/${model##*/} site=${SITE-$here/.carry/site}
    folder=${folder%.gguf}
    echo "== writing $model out as a folder"
    PYTHONPATH=$PYTHONPATH:$site "$python" -c 'import pathlib, sys
from outrider.core.errors import OutriderError
from outrider.models.export import export
try:
    export(*map(pathlib.Path, sys.argv[1:]))
except OutriderError as error:
    sys.exit(f"h200_measure: {error}")' "$model" "$folder" || exit 2
    model=$folder
}

bench() { # NAME BATCHES OPTIONS...: drafters against plain decoding
    local name=$1 batches=$2 drafts=() draft
    shift 2
    for draft in ${DRAFTS:-ngram medusa eagle eagle:tree=16 auto}; do drafts+=(--draft "$draft"); done
    # shellcheck disable=SC2086
    "$python" -m outrider bench --device "${DEVICE:-cuda}" --dtype bfloat16 --model "$model" --prompts "$prompts" \
        --batches "$batches" "${drafts[@]}" "$@" --output "$work/$name" ${BENCH_OPTIONS:-}
}

shape() { # NAME PART
    "$python" -m outrider bench --device "${DEVICE:-cuda}" --model "$model" --parts "$2" --output "$work/$1"
}

stage() { # NAME: what it runs; what can end by itself is told to, in time
    local left=$(($(limit "$1") - 20))
    [ $left -gt 5 ] || left=5
    # shellcheck disable=SC2086
    case $1 in
    speed) bench speed 1 --rounds 5 --seconds $left ;;
    batches) bench batches 4,16,64,256 --rounds 5 --warm-up 45 --seconds $left ;;
    serve)
        DRAFTS=${SERVE_DRAFTS:-eagle:tree=16} LIMIT=${LIMIT:-1} PYTHON=$python \
            "$here/scripts/h200_serve.sh" "$model" "$prompts" "$work/serve" --seconds $left ${SERVE_OPTIONS:-}
        ;;
    shape8b) shape shape8b 8b ;;
    oracle8b) shape oracle8b 8b-oracle ;;
    eagle8b)
        mkdir -p "$work/eagle8b"
        "$python" "$here/scripts/round_cost.py" --shape 8b --batches 1,8 --specs eagle:length=5 --rounds 48 \
            --repeats 3 --prompt 256 ${ROUND_OPTIONS:-} | tee "$work/eagle8b/rounds.jsonl"
        ;;
    esac
}

pack() { # all reports so far, replaced as a whole, by one at a time
    (
        flock 9
        tar -C "$work" --exclude=./model -czf "$work.tgz" . 2>/dev/null || true # a file may grow while it is read
        cp "$work.tgz" "$out/results.tgz.new" && mv "$out/results.tgz.new" "$out/results.tgz"
    ) 9>"$work.lock"
}

run_stages() { # NAME...: one after the other; whether all went well
    local name began code failed=0
    for name in "$@"; do
        [ -z "${asked:-}" ] || break
        began=$SECONDS code=0
        echo "== $name, at most $(limit "$name") s"
        # at its time SIGTERM, upon which a report is written, and 15 s later the end
        timeout --kill-after=15 "$(limit "$name")" "$0" stage "$name" > >(tee "$out/$name.log") 2>&1 &
        child=$!
        wait $child || code=$?
        while kill -0 $child 2>/dev/null; do wait $child || code=$?; done # a signal ends a wait, not the stage
        child=
        pack
        echo "== $name: exit $code after $((SECONDS - began)) s"
        [ $code = 0 ] || failed=1
    done
    return $failed
}

case ${1:-} in
site)
    site "${2:-$here/.carry}"
    ;;
parts)
    [ $# = 3 ] && [ -f "$2" ] || fail "parts needs a FILE that is there, and a FOLDER"
    mkdir -p "$3"
    split -b $PART -d "$2" "$3/$(basename "$2")."
    ls -l "$3"
    ;;
stage) # of `run`, which has checked and exported everything
    trap : TERM # it waits until its command has written a report
    stage "$2"
    ;;
run)
    [ $# -ge 4 ] || fail "run needs MODEL, PROMPTS and OUT; see the head of $0"
    export model=$2 prompts=$3 out=$4
    shift 4
    [ -f "$model" ] || [ -f "$model/config.json" ] || fail "no model at $model: it must be a folder or a GGUF file"
    [ -f "$prompts" ] || fail "no prompts at $prompts"
    for name in "$@"; do
        [[ " ${STAGES[*]} " == *" $name "* ]] || fail "no stage is called $name; known: ${STAGES[*]}"
    done
    mkdir -p "$out" 2>/dev/null && [ -w "$out" ] || fail "cannot write to $out"
    export PYTHONPATH="$here/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
    work=$(mktemp -d)
    export work
    trap 'kill ${packing:-} 2>/dev/null || true; pack; rm -rf "$work" "$work.tgz" "$work.lock"' EXIT
    [ ! -f "$model" ] || as_folder
    trap 'asked=1; [ -z "${child:-}" ] || kill -TERM $child 2>/dev/null || true' TERM INT
    (while sleep $PACK_EVERY; do pack; done) &
    packing=$!
    if [ $# -gt 0 ]; then run_stages "$@"; else run_stages "${STAGES[@]}"; fi
    ;;
*)
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
