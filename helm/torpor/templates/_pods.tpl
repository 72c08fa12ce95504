{{- define "torpor.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "torpor.security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Of every container. Ray's processes and Python's caches write into HOME and /tmp alone. */}}
{{- define "torpor.environment" -}}
- {name: HOME, value: /tmp/home}
- {name: RAY_AUTH_MODE, value: token}
- {name: RAY_USAGE_STATS_ENABLED, value: "0"}
- {name: PYTHONDONTWRITEBYTECODE, value: "1"}
{{- end -}}

{{/* Requests equal limits: the pod is the last one that a full node evicts. Takes cpu, memory, gpus. */}}
{{- define "torpor.resources" -}}
{{- $amounts := dict "cpu" (toString .cpu) "memory" .memory -}}
{{- if .gpus -}}{{- $_ := set $amounts "nvidia.com/gpu" (int64 .gpus) -}}{{- end -}}
{{- toYaml (dict "requests" $amounts "limits" $amounts) -}}
{{- end -}}

{{/* Where pods run: of a map with nodeSelector, tolerations, affinity, runtimeClassName. */}}
{{- define "torpor.placement" -}}
{{- $kept := dict -}}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "runtimeClassName" -}}
{{- with get $ $key -}}{{- $_ := set $kept $key . -}}{{- end -}}
{{- end -}}
{{- if $kept -}}{{- toYaml $kept -}}{{- end -}}
{{- end -}}

{{/* What pods of every kind have alike. */}}
{{- define "torpor.podBasics" -}}
serviceAccountName: {{ include "torpor.fullname" . }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
securityContext: {{- include "torpor.podSecurity" . | nindent 2 }}
{{- end -}}

{{- define "torpor.modelMount" -}}
{{- if .Values.modelStorage.existingClaim -}}
- {name: models, mountPath: {{ .Values.modelStorage.mountPath }}, readOnly: true}
{{- end }}
{{- end -}}

{{- define "torpor.modelVolume" -}}
{{- if .Values.modelStorage.existingClaim -}}
- name: models
  persistentVolumeClaim: {claimName: {{ .Values.modelStorage.existingClaim }}, readOnly: true}
{{- end }}
{{- end -}}
