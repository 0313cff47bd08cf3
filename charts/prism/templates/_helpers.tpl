{{/* Name of the operator: of its objects, its Lease and its key, and the instance in labels. A release name has at most 53 characters and is unique in its namespace. */}}
{{- define "prism.operator" -}}
{{ .Release.Name }}-operator
{{- end }}

{{/* Prefix of cluster-scoped names. Neither part can hold a colon, so no two releases share it. */}}
{{- define "prism.clusterName" -}}
prism:{{ .Release.Namespace }}:{{ .Release.Name }}
{{- end }}

{{- define "prism.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "prism.operator" .) }}
{{- else -}}
{{ required "serviceAccount.name is needed where serviceAccount.create is false" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{/* Selector of the pods of one component. Call with (dict "root" $ "component" "operator"). */}}
{{- define "prism.selector" -}}
app.kubernetes.io/name: prism
app.kubernetes.io/instance: {{ include "prism.operator" .root }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "prism.labels" -}}
{{ include "prism.selector" . }}
app.kubernetes.io/part-of: prism
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{/* Reference of an image. Call with (dict "root" $ "image" "operator"). `helm upgrade --reuse-values` keeps the values of the older release: an image that it did not know has none, and is named as all are. */}}
{{- define "prism.image" -}}
{{- $image := get .root.Values.images .image | default dict }}
{{- with .root.Values.image.registry }}{{ trimSuffix "/" . }}/{{ end }}
{{- $image.repository | default (printf "prism-%s" (kebabcase .image)) }}
{{- if $image.digest -}}
@{{ $image.digest }}
{{- else -}}
:{{ $image.tag | default .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end }}
{{- end }}

{{/* Pod Security "restricted". */}}
{{- define "prism.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "prism.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}
