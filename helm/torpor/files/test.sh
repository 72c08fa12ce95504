is() { torpor status --json | python3 -c 'import json, sys
states = {model["name"]: model["state"] for model in json.load(sys.stdin)["models"]}
sys.exit(states.get(sys.argv[1]) != sys.argv[2])' "$MODEL" "$1" || { echo "$MODEL is not $1" >&2; exit 1; }; }
mkdir -p "$HOME"
torpor sleep "$MODEL"
is asleep
torpor wake "$MODEL"
is awake
