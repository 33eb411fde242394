{{- define "kvfs.name" -}}
{{- .Release.Name | replace "." "-" | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvfs.labels" -}}
app.kubernetes.io/name: kvfs
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{/* Of a component: {root, component}. */}}
{{- define "kvfs.selector" -}}
app.kubernetes.io/name: kvfs
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "kvfs.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- define "kvfs.pool" -}}
{{ .Values.pool.directory }}/{{ .Values.pool.name }}
{{- end -}}

{{- define "kvfs.mount" -}}
{{ .Values.pool.mounts }}/{{ .Values.pool.name }}
{{- end -}}

{{- define "kvfs.hold" -}}
{{ .Values.hold.directory }}/{{ .Values.pool.name }}.sock
{{- end -}}

{{/* The daemon's file of options. A text, number or list is the same in JSON and in TOML. */}}
{{- define "kvfs.options" -}}
{{- $options := dict "allow-other" true "log-format" .Values.daemon.logFormat -}}
{{- with .Values.daemon.staging }}{{ $_ := set $options "staging" . }}{{ end -}}
{{- with .Values.daemon.readMemory }}{{ $_ := set $options "read-memory" . }}{{ end -}}
{{- if .Values.hold.enabled }}{{ $_ := set $options "hold" (include "kvfs.hold" .) }}{{ end -}}
{{- $native := list -}}
{{- range .Values.native.namespaces }}{{ $native = append $native (printf "/%s" .) }}{{ end -}}
{{- with $native }}{{ $_ := set $options "native-in" . }}{{ end -}}
{{- if .Values.metrics.enabled }}{{ $_ := set $options "metrics" (printf "0.0.0.0:%d" (int .Values.metrics.port)) }}{{ end -}}
{{- range $name, $value := .Values.daemon.options }}{{ $_ := set $options $name $value }}{{ end -}}
{{- range $name, $value := $options }}
{{ $name }} = {{ toJson $value }}
{{- end }}
{{- end -}}

{{/* What both pods of a node share. */}}
{{- define "kvfs.pod" -}}
serviceAccountName: {{ include "kvfs.name" . | quote }}
automountServiceAccountToken: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
nodeSelector:
  kubernetes.io/os: linux
  {{- with .Values.nodeSelector }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* What no pattern of the schema can say. */}}
{{- define "kvfs.check" -}}
{{- $pool := .Values.pool -}}
{{- $has := or $pool.devices $pool.nodes -}}
{{- if and (not $has) (not $pool.files) -}}
{{- fail "pool has no devices: give pool.devices, pool.nodes or pool.files" -}}
{{- end -}}
{{- if and $has $pool.files -}}
{{- fail "pool.files stands in place of devices: give either pool.files or pool.devices and pool.nodes" -}}
{{- end -}}
{{- if hasPrefix (printf "%s/" $pool.mounts) (printf "%s/" $pool.directory) -}}
{{- fail (printf "pool.directory %s lies in pool.mounts %s: no pool may lie below its mount" $pool.directory $pool.mounts) -}}
{{- end -}}
{{- if and .Values.metrics.serviceMonitor.enabled (not .Values.metrics.enabled) -}}
{{- fail "metrics.serviceMonitor.enabled needs metrics.enabled: there is nothing to scrape" -}}
{{- end -}}
{{- if and .Values.volumes (not .Values.csi.enabled) -}}
{{- fail "volumes need csi.enabled: nobody would mount them" -}}
{{- end -}}
{{- if and .Values.hold.enabled (hasKey (.Values.daemon.options | default dict) "request-timeout") -}}
{{- fail "daemon.options.request-timeout: with hold.enabled the kernel would end the mount while no daemon serves it" -}}
{{- end -}}
{{- $claims := list -}}
{{- range .Values.volumes -}}
{{- $claim := printf "%s/%s" .namespace .claim -}}
{{- if has $claim $claims -}}{{- fail (printf "volumes: claim %s is there twice" $claim) -}}{{- end -}}
{{- $claims = append $claims $claim -}}
{{- end -}}
{{- end -}}
