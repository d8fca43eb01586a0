#!/usr/bin/env bash
# Adapters on a rented GPU, in the background of other work (docs/benchmarks/lora).
#
#   scripts/h200_adapters.sh start MODEL ADAPTERS OUT MINUTES [PROMPTS]  starts the steps and returns at once
#   scripts/h200_adapters.sh look OUT          which step it is at, and the last lines
#   scripts/h200_adapters.sh stop OUT          SIGTERM: a training saves; waits for the end
#   scripts/h200_adapters.sh pack OUT FOLDER   what is to be kept
#
# MODEL: a folder or GGUF file, named SmolLM2-135M-Instruct so that its shipped head is found. ADAPTERS: a folder with
# one folder for each adapter. MINUTES: of each `train eagle --adapter`. PROMPTS: JSONL in Spec-Bench's form.
# STEPS (default "gpu tests train table"), of which each writes OUT/STEP.log:
#   gpu    64 sequences with 16 adapters against none, alone against company, passes (scripts/adapter_gpu.py)
#   tests  tests/gpu/test_adapters.py -k "$TESTS" (default 8b)
#   train  `outrider train eagle --adapter` for each of STYLES (default haiku), into OUT/heads/NAME
#   table  the model's head and these, with each adapter (scripts/adapter_heads.py)
# GPU_OPTIONS, TRAIN_OPTIONS, TABLE_OPTIONS: further options of these commands; PYTHON: which one.
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$here/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
python=${PYTHON:-python3}

runs() { [ -f "$1/pid" ] && kill -0 "$(cat "$1/pid")" 2>/dev/null; }

step() { # NAME MODEL ADAPTERS OUT MINUTES [PROMPTS]
    local name=$1 model=$2 adapters=$3 out=$4 minutes=$5 prompts=${6:-} style folder
    local options=(--model "$model")
    # shellcheck disable=SC2206
    case $name in
    gpu)
        options+=(--alone 64 --rounds 12 -d ngram -d eagle:tree=16 -d auto ${GPU_OPTIONS:-})
        "$python" "$here/scripts/adapter_gpu.py" "${options[@]}" ${prompts:+--prompts "$prompts"}
        ;;
    tests)
        "$python" -m pytest "$here/tests/gpu/test_adapters.py" -m gpu -q -p no:cacheprovider -k "${TESTS:-8b}"
        ;;
    train)
        "$python" "$here/scripts/adapter_styles.py" --openers "$out/openers.txt"
        for style in ${STYLES:-haiku}; do
            "$python" -m outrider train eagle "${options[@]}" --adapter "$adapters/$style" --out "$out/heads/$style" \
                --minutes "$minutes" --about "$out/openers.txt" --no-whole ${TRAIN_OPTIONS:-}
        done
        ;;
    table)
        for folder in "$adapters"/*/; do
            style=$(basename "$folder")
            options+=(--adapter "$style=$folder")
            [ ! -s "$out/heads/$style/model.safetensors" ] || options+=(--head "$style=$out/heads/$style")
        done
        "$python" "$here/scripts/adapter_heads.py" "${options[@]}" ${prompts:+--prompts "$prompts"} ${TABLE_OPTIONS:-}
        ;;
    *) echo "h200_adapters: no step is called $name" && exit 2 ;;
    esac
}

case ${1:-} in
start)
    mkdir -p "$4"
    runs "$4" && echo "it runs already" && exit 1
    setsid "$0" background "${@:2}" </dev/null >>"$4/all.log" 2>&1 &
    ;;
background) # in a session of its own: it goes on when the command that began it ends
    out=$4
    echo $$ >"$out/pid"
    trap 'asked=1; [ -z "${child:-}" ] || kill -TERM -- "-$child" 2>/dev/null || true' TERM
    set -m # a step is a process group of its own
    for name in ${STEPS:-gpu tests train table}; do
        [ -z "${asked:-}" ] || break
        began=$SECONDS
        (trap : TERM && step "$name" "${@:2}") >"$out/$name.log" 2>&1 & # it waits until its command has saved
        child=$!
        code=0
        wait $child || code=$?
        while kill -0 $child 2>/dev/null; do wait $child || code=$?; done # a signal ends a wait, not the step
        echo "$name: exit $code after $((SECONDS - began)) s"
    done
    echo "the end, $SECONDS s"
    ;;
look)
    runs "$2" && echo "it runs" || echo "it has ended"
    cat "$2/all.log"
    last=$(ls -t "$2"/*.log | grep -v all.log | head -n 1)
    echo "$last" && tail -n 6 "$last"
    ;;
stop)
    runs "$2" && kill -TERM "$(cat "$2/pid")"
    for _ in $(seq 60); do runs "$2" && sleep 1 || break; done
    tail -n 3 "$2/all.log"
    ;;
pack)
    mkdir -p "$3"
    cp "$2"/*.log "$3"
    if [ -d "$2/heads" ]; then
        tar -C "$2" --exclude=training/now --exclude='*.safetensors.tmp' --exclude='training/[!l]*' -czf - heads |
            split -b 15000000 - "$3/heads.tgz."
    fi
    ls -l "$3"
    ;;
*)
    sed -n '2,19p' "$0"
    exit 2
    ;;
esac
