{{/* What the schema cannot say in plain words. */}}
{{- define "torpor.check" -}}
{{- if not .Values.auth.existingSecret -}}
{{- fail "auth.existingSecret is empty: the front door listens to the whole network, so it needs tokens. Make a Secret (README, Before you install) and name it" -}}
{{- end -}}
{{- if not .Values.ray.authSecret -}}
{{- fail "ray.authSecret is empty: whoever reaches Ray without a token may run anything. Make a Secret with the key auth_token and name it" -}}
{{- end -}}
{{- if not .Values.config.models -}}
{{- fail "config.models is empty: name at least one model, such as --set config.models[0].name=chat --set config.models[0].engine.model=/models/chat.gguf" -}}
{{- end -}}
{{- if not .Values.workers -}}
{{- fail "workers is empty: models run on workers only; add a group, such as {name: gpu, gpus: 1, cpu: \"4\", memory: {limit: 32Gi}}" -}}
{{- end -}}
{{- $names := list -}}
{{- range $index, $model := .Values.config.models -}}
{{- $names = append $names $model.name -}}
{{- $path := dig "engine" "model" "" $model -}}
{{- if not (hasPrefix "/" $path) -}}
{{- fail (printf "config.models[%d].engine.model is %q: give the absolute path of a GGUF file or a folder, in the image or under modelStorage.mountPath" $index $path) -}}
{{- end -}}
{{- end -}}
{{- range .Values.workers -}}
{{- range $wanted := default list .models -}}
{{- if not (has $wanted $names) -}}
{{- fail (printf "workers: a group names the model %q, and config.models has %s only" $wanted (join ", " $names)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with .Values.ray.gcsFaultTolerance -}}
{{- if and .enabled (eq .backend "redis") (not .redisAddress) -}}
{{- fail "ray.gcsFaultTolerance.redisAddress is empty: give redis' HOST:PORT, or set backend: rocksdb" -}}
{{- end -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not (and .Values.ingress.host .Values.ingress.tlsSecret)) -}}
{{- fail "ingress.host and ingress.tlsSecret are both required with an Ingress: without TLS tokens travel in the clear" -}}
{{- end -}}
{{- if and .Values.monitoring.serviceMonitor (not .Values.monitoring.tokenSecret) -}}
{{- fail "monitoring.tokenSecret is empty: /metrics wants a viewer's token; name the Secret that holds one" -}}
{{- end -}}
{{- if and .Values.config.node (dig "disk_path" "" .Values.config.node) -}}
{{- range .Values.workers -}}
{{- if not .diskSize -}}
{{- fail (printf "config.node.disk_path is set, and the worker group %q has no diskSize: its pods' root is read-only; give the volume a size" .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Pinned memory and shared memory count against a pod's limit; over it the kernel kills a rank in the middle of a sleep.
     Takes (list root group). */}}
{{- define "torpor.checkMemory" -}}
{{- $config := (index . 0).Values.config -}}
{{- $group := index . 1 -}}
{{- $limit := include "torpor.bytes" $group.memory.limit | int64 -}}
{{- $base := include "torpor.bytes" (default "4Gi" $group.memory.base) | int64 -}}
{{- $shm := include "torpor.bytes" (default "1Gi" $group.memory.shm) | int64 -}}
{{- $gpus := default 0 $group.gpus | int64 -}}
{{- $budget := dig "host_bytes" "" (default dict $config.node) -}}
{{- $pool := include "torpor.bytes" (dig "bytes" "1GiB" (default dict $config.host_pool)) | int64 -}}
{{- $kept := int64 0 -}}
{{- $devices := int64 0 -}}
{{- $ranks := int64 0 -}}
{{- range $model := $config.models -}}
{{- if or (not $group.models) (has $model.name $group.models) -}}
{{- $here := default 1 $model.tensor_parallel | int64 -}}
{{- $ranks = max $ranks $here -}}
{{- if $gpus -}}{{- $here = min $here $gpus -}}{{- end -}}
{{- $tier := include "torpor.bytes" (dig "host_bytes" "1GiB" (default dict $model.kv_cache)) | int64 -}}
{{- $kept = add $kept (mul $here $tier) (div (mul $pool $here) (default 1 $model.tensor_parallel | int64)) -}}
{{- end -}}
{{- end -}}
{{- $kept = add $kept (include "torpor.bytes" (default 0 $group.memory.weights) | int64) -}}
{{- if $budget -}}{{- $kept = include "torpor.bytes" $budget | int64 -}}{{- end -}}
{{- if not $gpus -}}
{{- $count := dig "count" "" (default dict $config.device) | default $ranks | int64 -}}
{{- $devices = mul $count (include "torpor.bytes" (dig "host_capacity" "4GiB" (default dict $config.device)) | int64) -}}
{{- end -}}
{{- $needed := add $base $kept $shm $devices -}}
{{- if lt $limit $needed -}}
{{- $more := ternary (printf " + %s of host devices" (include "torpor.gib" $devices)) "" (gt $devices (int64 0)) -}}
{{- fail (printf "workers: the group %q has memory.limit %s, and needs %s: %s base + %s kept in host memory + %s shm%s. Raise the limit, or lower kv_cache.host_bytes, host_pool.bytes or node.host_bytes" $group.name (include "torpor.gib" $limit) (include "torpor.gib" $needed) (include "torpor.gib" $base) (include "torpor.gib" $kept) (include "torpor.gib" $shm) $more) -}}
{{- end -}}
{{- end -}}
