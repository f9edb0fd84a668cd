#!/usr/bin/env bash
# The second fixed text of `octavo bench --perplexity`: the King James Bible out of Debian's packages, one verse a line
# without its reference. Nothing is installed. Usage: scripts/texts.sh [FOLDER]   (prints the file's name)
set -euo pipefail
folder=${1:-$HOME/.cache/octavo/texts}
mkdir -p "$folder"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
chmod 755 "$scratch"
(
    cd "$scratch"
    apt-get download bible-kjv bible-kjv-text >/dev/null
    for package in *.deb; do dpkg-deb -x "$package" .; done
    usr/bin/bible -p usr/lib -f 'gen1:1-rev22:21' | sed 's/^[^ ]* //' >kjv.txt
)
mv "$scratch/kjv.txt" "$folder/kjv.txt"
sha256sum "$folder/kjv.txt" >&2
echo "$folder/kjv.txt"
