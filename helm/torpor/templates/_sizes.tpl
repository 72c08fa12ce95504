{{/* Bytes from Torpor's sizes (1GiB, 1.5 GB, 1048576) and Kubernetes' (16Gi, 16G). */}}
{{- define "torpor.bytes" -}}
{{- $text := toString . | trim -}}
{{- if kindIs "float64" . -}}{{- $text = printf "%.0f" . -}}{{- end -}}
{{- if not (regexMatch "^[0-9]+([.][0-9]+)?\\s*([kKmMgGtT]([iI]?[bB]?)|[bB])?$" $text) -}}
{{- fail (printf "%q is no size; write it like 16Gi or 2GiB" $text) -}}
{{- end -}}
{{- $number := regexFind "^[0-9]+([.][0-9]+)?" $text -}}
{{- $unit := regexFind "[a-zA-Z]*$" $text | lower | trimSuffix "b" -}}
{{- $factors := dict "" 1 "k" 1000 "m" 1000000 "g" 1000000000 "t" 1000000000000 "ki" 1024 "mi" 1048576 "gi" 1073741824 "ti" 1099511627776 -}}
{{- $factor := get $factors $unit -}}
{{- if contains "." $number -}}
{{- mulf (float64 $number) (float64 $factor) | int64 -}}
{{- else -}}
{{- mul (int64 $number) (int64 $factor) -}}
{{- end -}}
{{- end -}}

{{/* For people: in GiB. */}}
{{- define "torpor.gib" -}}
{{- printf "%.2f GiB" (divf (float64 .) 1073741824.0) -}}
{{- end -}}

{{/* Seconds from 30, "30s", "2m", "1h", "500ms"; rounded up. */}}
{{- define "torpor.seconds" -}}
{{- $text := toString . | trim -}}
{{- if not (regexMatch "^[0-9]+([.][0-9]+)?\\s*(ms|s|m|min|h)?$" $text) -}}
{{- fail (printf "%q is no duration; write it like 30 or 2m" $text) -}}
{{- end -}}
{{- $factor := get (dict "" 1.0 "s" 1.0 "ms" 0.001 "m" 60.0 "min" 60.0 "h" 3600.0) (regexFind "[a-z]*$" $text) -}}
{{- ceil (mulf (float64 (regexFind "^[0-9]+([.][0-9]+)?" $text)) $factor) | int64 -}}
{{- end -}}
