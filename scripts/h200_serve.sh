#!/usr/bin/env bash
# A server on a rented GPU under load, with drafts and without, beside the library's own speed.
#
#   scripts/h200_serve.sh MODEL PROMPTS OUT [OPTIONS of outrider bench serve...]
#
# MODEL: a folder. PROMPTS: JSONL in Spec-Bench's form. OUT: a folder; report.json and report.md are written there after
# every round. SITE: a folder with packages that this Python lacks (fastapi, uvicorn, pydantic, httpx, httptools,
# prometheus-client), .carry/site unless given. DEVICE, STREAMS, DRAFTS, ROUNDS, LIMIT (prompts of each kind), TOKENS:
# cuda, "1,8,32,128", "auto", 3, 4, 128 unless given. PYTHON: which one. On a GPU the server and the library load beside
# each other; `--seconds 150` bounds all of it.
set -euo pipefail
[ $# -ge 3 ] || { sed -n '2,11p' "$0" && exit 2; }
here=$(cd "$(dirname "$0")/.." && pwd)
site=${SITE-$here/.carry/site}
export PYTHONPATH="$here/src${site:+:$site}${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
# uvicorn needs click, which comes with most versions of typer: a second one before it could be one too many
"${PYTHON:-python3}" -c "import click" 2>/dev/null || PYTHONPATH="$PYTHONPATH:$(dirname "$site")/extra/click"
model=$1 prompts=$2 out=$3
shift 3
drafts=()
for draft in ${DRAFTS:-auto}; do drafts+=(--draft "$draft"); done
exec "${PYTHON:-python3}" -m outrider bench serve --model "$model" --prompts "$prompts" --limit "${LIMIT:-4}" \
    --device "${DEVICE:-cuda}" --streams "${STREAMS:-1,8,32,128}" --rounds "${ROUNDS:-3}" \
    --max-tokens "${TOKENS:-128}" --warm-up --ignore-eos --library "${drafts[@]}" --output "$out" "$@"
