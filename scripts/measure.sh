#!/usr/bin/env bash
# Measure the figures of the README and docs/performance.md into benchmarks/results, on an otherwise idle machine.
# Usage: scripts/measure.sh [decode] [depth] [prefill] [gemma] [chat] [streams] [perplexity] [hisparse] [vllm]
# (default: all but vllm)
# `make peers` first. vllm needs its environment and a safetensors folder (benchmarks/export_safetensors.py).
set -euo pipefail
cd "$(dirname "$0")/.."
octavo=${VENV:-.venv}/bin/octavo
results=benchmarks/results
model=${MODEL:-smollm2}
repeats=${REPEATS:-5}
mkdir -p "$results"

busy=$(cut -d' ' -f1 /proc/loadavg)
if awk "BEGIN { exit !($busy > 0.7) }"; then
    echo "measure: the load is $busy; other work on this machine will void the spreads" >&2
fi

bench() { # file, arguments…
    local file=$results/$1
    shift
    echo "measure: $file"
    "$octavo" bench --model "$model" --repeats "$repeats" --out "$file" "$@" 2>/dev/null
}

for part in "${@:-decode depth prefill gemma chat streams perplexity hisparse}"; do
    for name in $part; do
        case $name in
            decode) bench "decode.json" --depth 128 --output-tokens 512 --peer llama.cpp ;;
            depth) # the peer's prefill is slow
                bench "depth.json" --depth 2048 --output-tokens 128 --peer llama.cpp
                bench "depth-8000.json" --depth 8000 --output-tokens 384 --peer llama.cpp
                ;;
            prefill) bench "prefill.json" --prefill 512,1024 --peer llama.cpp ;;
            gemma)
                model=gemma3-270m bench "gemma.json" --accept-license --depth 128 --output-tokens 128 --turns 2 --repeats 30 --peer llama.cpp
                ;;
            chat)
                bench "chat.json" --chat --mode plain,ngram,ngram+table,eagle3,dflash --output-tokens 128 --peer llama.cpp
                bench "profile.json" --chat --limit 8 --mode plain,ngram+table,eagle3,dflash --output-tokens 128 \
                    --profile --plot docs/drafts-chat.svg
                ;;
            streams)
                bench "streams.json" --chat --mode plain,ngram,ngram+table,eagle3,dflash --streams 4,16 --output-tokens 128 \
                    --repeats 9
                bench "warm.json" --chat --limit 20 --temperature 0.8 --mode plain,ngram+table,eagle3,dflash \
                    --streams 1,4,16 --output-tokens 128
                bench "scripted.json" --chat --limit 20 --mode plain,scripted,best --streams 1,4,16 --output-tokens 128
                ;;
            perplexity)
                bench "perplexity.json" --perplexity exact,float32,auto,int8,int4,bf16 --perplexity-tokens 16384
                bench "perplexity-topics.json" --perplexity exact,auto --perplexity-tokens 100000 --peer llama.cpp
                bench "perplexity-kjv.json" --perplexity exact,auto --perplexity-tokens 100000 --peer llama.cpp \
                    --perplexity-text "$(bash scripts/texts.sh)"
                ;;
            hisparse)
                "${VENV:-.venv}"/bin/python benchmarks/hisparse.py --parts memory,speed --streams 1,8 --peer llama.cpp --fresh \
                    --fractions 4,8,16 --json "$results/hisparse-speed.json" --plot docs/hisparse-speed.svg
                # hours; a second call goes on where the first was stopped, a file of an earlier format is begun anew
                fresh=$(grep -qs '"octavo-hisparse-2"' "$results/hisparse-quality.json" || echo --fresh)
                # shellcheck disable=SC2086  # $fresh is a flag or nothing
                "${VENV:-.venv}"/bin/python benchmarks/hisparse.py --parts perplexity,needle --windows 3 --seeds 20 \
                    --threads 1 $fresh --json "$results/hisparse-quality.json" --plot docs/hisparse-quality.svg
                "${VENV:-.venv}"/bin/python benchmarks/hisparse.py --parts memory,perplexity,needle --seeds 20 --threads 1 \
                    --model gemma3-270m --contexts 4096,16384,32768 --windows 2 \
                    --json "$results/hisparse-gemma.json" --plot docs/hisparse-gemma.svg
                ;;
            vllm)
                folder=$(mktemp -d)
                "${VENV:-.venv}"/bin/python benchmarks/export_safetensors.py "$model" "$folder"
                MODEL=$folder model=$folder bench "vllm.json" --depth 128 --streams 16 --output-tokens 128 \
                    --dtype bfloat16 --quantization none --peer vllm
                bench "vllm4.json" --depth 128 --streams 16 --output-tokens 128 --peer vllm --peer-model "$folder"
                rm -rf "$folder"
                ;;
            *) echo "no such part: $name" >&2; exit 2 ;;
        esac
    done
done
