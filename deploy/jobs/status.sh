#!/bin/sh
# The states of all models, asked in the Ray cluster itself: no front door is needed.
#   RAY_ADDRESS=http://HEAD:8265 RAY_AUTH_MODE=token RAY_AUTH_TOKEN=… deploy/jobs/status.sh [NAMESPACE]
exec ray job submit -- python3 -c '
import sys
from torpor.service import Client

with Client.from_ray(namespace=sys.argv[1]) as torpor:
    for model in torpor.models():
        print(model["name"], model["state"])
' "${1:-torpor}"
