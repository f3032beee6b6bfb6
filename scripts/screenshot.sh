#!/usr/bin/env bash
# A picture of a page, such as report.html, by headless Chromium: scripts/screenshot.sh PAGE.html OUT.png [WIDTH,HEIGHT]
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: $0 PAGE.html OUT.png [WIDTH,HEIGHT]" >&2; exit 2; }
page=$(realpath "$1")
browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome) ||
  { echo "no Chromium found: apt-get install chromium" >&2; exit 1; }
profile=$(mktemp -d)
trap 'rm -rf "$profile"' EXIT
"$browser" --headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking \
  --disable-component-update --disable-sync --user-data-dir="$profile" --hide-scrollbars \
  --window-size="${3:-1240,1700}" --screenshot="$2" "file://$page" 2>/dev/null
[ -s "$2" ] || { echo "no picture was written" >&2; exit 1; }
