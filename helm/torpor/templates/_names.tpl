{{/* Every template asks for it, so that the values are checked whichever is rendered first. KubeRay takes names of
     Ray jobs of up to 47 characters, of which -apply- and a hash are 15, and names that begin with a letter. */}}
{{- define "torpor.fullname" -}}
{{- include "torpor.check" . -}}
{{- $name := default .Release.Name .Values.fullnameOverride -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]{0,30}[a-z0-9])?$" $name) -}}
{{- fail (printf "%q cannot be the name of a Ray cluster: begin with a letter, then at most 31 of a-z, 0-9 and -; name the release so, or set fullnameOverride" $name) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{- define "torpor.labels" -}}
app.kubernetes.io/name: torpor
{{ include "torpor.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* What selects pods: never changes with a version. Not app.kubernetes.io/name, which KubeRay gives a value of its own
     on the pods that it makes, and selects the head by. */}}
{{- define "torpor.selector" -}}
app.kubernetes.io/part-of: torpor
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
