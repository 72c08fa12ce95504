#!/bin/sh
# Makes the models of a Ray cluster as torpor.yaml says, by a job on its head, where that file is.
#   RAY_ADDRESS=http://HEAD:8265 RAY_AUTH_MODE=token RAY_AUTH_TOKEN=… deploy/jobs/apply.sh [/etc/torpor/torpor.yaml]
# Repeat it as often as you like: apply compares first. Not by a submission id of your own, for Ray takes each id once only.
exec ray job submit -- torpor apply -f "${1:-/etc/torpor/torpor.yaml}"
