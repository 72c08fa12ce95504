{{/* KubeRay appends -head-svc and group names, and names end at 63 characters.
     Every template asks for it, so that the values are checked whichever is rendered first. */}}
{{- define "torpor.fullname" -}}
{{- include "torpor.check" . -}}
{{- default .Release.Name .Values.fullnameOverride | trunc 36 | trimSuffix "-" -}}
{{- end -}}

{{- define "torpor.labels" -}}
app.kubernetes.io/name: torpor
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* What selects pods: never changes with a version. */}}
{{- define "torpor.selector" -}}
app.kubernetes.io/name: torpor
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "torpor.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}{{ .repository }}@{{ .digest }}{{- else -}}{{ .repository }}:{{ default $.Chart.AppVersion .tag }}{{- end -}}
{{- end -}}
{{- end -}}

{{- define "torpor.head" -}}
{{ include "torpor.fullname" . }}-head-svc:6379
{{- end -}}
