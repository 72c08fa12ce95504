{{/* torpor.yaml: the values, and over them what follows from the pods. */}}
{{- define "torpor.config" -}}
{{- $own := dict
  "http" (dict "host" "0.0.0.0" "port" 8700)
  "auth" (dict "tokens_file" (printf "/etc/torpor-tokens/%s" .Values.auth.key))
  "ray" (dict "address" (include "torpor.head" .))
  "journal" (dict "path" "/var/lib/torpor/journal.db")
-}}
{{- toYaml (mergeOverwrite (deepCopy .Values.config) $own) -}}
{{- end -}}

{{/* Of the file as it is mounted. */}}
{{- define "torpor.configHash" -}}
{{- printf "%s\n" (include "torpor.config" .) | sha256sum -}}
{{- end -}}

{{/* A name of its own for each configuration, image and revision: what has run once is not run again. */}}
{{- define "torpor.applyName" -}}
{{- $what := printf "%s %s %s %v" (include "torpor.config" .) (include "torpor.image" .) .Values.apply.revision .Values.apply.prune -}}
{{ include "torpor.fullname" . }}-apply-{{ sha256sum $what | trunc 8 }}
{{- end -}}

{{/* Seconds from a SIGTERM to a front door's end. */}}
{{- define "torpor.endSeconds" -}}
{{- $times := default dict .Values.config.shutdown -}}
{{- $parking := 0 -}}
{{- if $times.park -}}{{- $parking = include "torpor.seconds" (dig "park_timeout_s" 60 $times) -}}{{- end -}}
{{- add (include "torpor.seconds" (dig "notice_s" 0 $times)) (include "torpor.seconds" (dig "drain_s" 5 $times)) $parking 5 -}}
{{- end -}}

{{- define "torpor.graceSeconds" -}}
{{- $needed := include "torpor.endSeconds" . | int64 -}}
{{- $given := .Values.frontDoor.terminationGracePeriodSeconds -}}
{{- if eq (toString (default "" $given)) "" -}}
{{- add $needed 10 -}}
{{- else if lt (int64 $given) $needed -}}
{{- fail (printf "frontDoor.terminationGracePeriodSeconds is %d, and config.shutdown needs %d s (notice_s + drain_s + parking + 5): raise it or shorten those, or requests are cut off" (int64 $given) $needed) -}}
{{- else -}}
{{- int64 $given -}}
{{- end -}}
{{- end -}}
