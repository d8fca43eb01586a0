#!/usr/bin/env bash
# A head on a rented GPU, in the background of other work (docs/guides/training.md, "On a rented GPU").
#
#   scripts/h200_train.sh smoke MODEL OUT                    at most 90 s: it writes, learns, stops, saves
#   scripts/h200_train.sh train MODEL OUT MINUTES [PROMPTS]  starts the run and returns at once; log: OUT.log
#   scripts/h200_train.sh look OUT                           where it is
#   scripts/h200_train.sh wait OUT SECONDS                   the same, when it has ended or after that time
#   scripts/h200_train.sh stop OUT                           SIGTERM: it saves and ends; waits for that
#   scripts/h200_train.sh table MODEL OUT PROMPTS [LIMIT]    a block head beside the shipped EAGLE head
#   scripts/h200_train.sh pack OUT FOLDER                    what is to be kept, in parts of 15 MB
#
# KIND: block (unless given) or eagle. MODEL: a folder or GGUF file (for which Python needs the package gguf). PROMPTS:
# JSONL in Spec-Bench's form; LIMIT: of each kind, 8 unless given, 0: all. TRAIN_OPTIONS: further options of the run;
# LAWS: of the table (greedy,coupled,rejection); PYTHON: which one.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$here/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
python=${PYTHON:-python3}

learn() { # MODEL OUT OPTIONS...
    local model=$1 out=$2
    shift 2
    # shellcheck disable=SC2086
    exec "$python" -m outrider train "${KIND:-block}" --model "$model" --out "$out" --no-whole "$@" ${TRAIN_OPTIONS:-}
}

steps() { cat "$1/training/log.jsonl" 2>/dev/null | wc -l; }

runs() { [ -f "$1.pid" ] && kill -0 "$(cat "$1.pid")" 2>/dev/null; }

case ${1:-} in
smoke)
    rm -rf "$3" && mkdir -p "$(dirname "$3")"
    (learn "$2" "$3" --tokens 100000 --minutes 3) >"$3.log" 2>&1 &
    pid=$!
    for _ in $(seq 90); do # until it has learned for 100 steps: by then its graphs are recorded
        sleep 1
        kill -0 $pid 2>/dev/null && [ "$(steps "$3")" -lt 100 ] || break
    done
    kill -TERM $pid 2>/dev/null || true
    wait $pid && code=0 || code=$?
    cat "$3.log"
    [ -s "$3/training/log.jsonl" ] && tail -n 1 "$3/training/log.jsonl"
    if [ "$code" = 130 ] && [ "$(steps "$3")" -gt 0 ] && [ -s "$3/model.safetensors" ]; then
        echo "smoke: well, $(steps "$3") steps in ${SECONDS} s"
    else
        echo "smoke: it failed (exit $code, $(steps "$3") steps, ${SECONDS} s)" && exit 1
    fi
    ;;
train)
    mkdir -p "$(dirname "$3")"
    options=(--minutes "$4")
    [ -n "${5:-}" ] && options+=(--eval "$5")
    setsid "$0" background "$2" "$3" "${options[@]}" </dev/null >"$3.log" 2>&1 &
    ;;
background) # in a session of its own: it goes on when the command that began it ends
    echo $$ >"$3.pid"
    learn "${@:2}"
    ;;
look)
    runs "$2" && echo "it runs" || echo "it has ended"
    tail -n 4 "$2.log"
    ;;
wait)
    for _ in $(seq "$3"); do runs "$2" && sleep 1 || break; done
    exec "$0" look "$2"
    ;;
stop)
    runs "$2" && kill -TERM "$(cat "$2.pid")"
    for _ in $(seq 60); do runs "$2" && sleep 1 || break; done
    tail -n 3 "$2.log"
    ;;
table)
    "$python" "$here/scripts/head_table.py" --model "$2" --head "block=$3" --head eagle= --prompts "$4" \
        --limit "${5:-8}" --laws "${LAWS:-greedy,coupled,rejection}" --out "$3"
    ;;
pack)
    mkdir -p "$3"
    files=$(cd "$2" && ls config.json model.safetensors provenance.json tokens_per_pass.* head_table.* \
        training.png training/log.jsonl training/data.json 2>/dev/null || true)
    # shellcheck disable=SC2086
    tar -C "$2" -czf - $files | split -b 15000000 - "$3/head.tgz."
    cp "$2.log" "$3/run.log"
    ls -l "$3"
    ;;
*)
    sed -n '2,15p' "$0"
    exit 2
    ;;
esac
