{{/* The release's name, with the chart's where it does not say so itself. Releases may have dots in their names and begin
     with a digit, Services and jobs not. */}}
{{- define "colocated-rl.name" -}}
{{- $release := .Release.Name | replace "." "-" -}}
{{- $name := contains .Chart.Name $release | ternary $release (printf "%s-%s" $release .Chart.Name) -}}
{{- if regexMatch "^[0-9]" $name -}}
{{- $name = printf "%s-%s" .Chart.Name $release -}}
{{- end -}}
{{- $name | trunc 52 | trimSuffix "-" -}}
{{- end -}}

{{/* Of objects of the cluster that each release has of its own: two may have one name, in two namespaces. */}}
{{- define "colocated-rl.cluster-name" -}}
{{ .Release.Namespace }}.{{ include "colocated-rl.name" . }}
{{- end -}}

{{/* Labels that never change: selectors. Network policies of jobs know the operator by the first, which is therefore not
     .Chart.Name: where a parent chart has an alias for this one, that is the alias. */}}
{{- define "colocated-rl.selector" -}}
app.kubernetes.io/name: colocated-rl
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "colocated-rl.labels" -}}
{{ include "colocated-rl.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: colocated-rl
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "colocated-rl.service-account" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "colocated-rl.name" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name is required with serviceAccount.create: false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Reference of one image: list of the root context and the image's values. */}}
{{- define "colocated-rl.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository (default $root.Chart.AppVersion $image.tag) -}}
{{- end -}}
{{- end -}}

{{/* The Secret of the authority that somebody else issues; empty where the operator makes its own. */}}
{{- define "colocated-rl.issued-authority" -}}
{{- if .Values.authority.secretName -}}
{{- .Values.authority.secretName -}}
{{- else if .Values.authority.certManager.enabled -}}
{{- printf "%s-issued" (include "colocated-rl.name" .) -}}
{{- end -}}
{{- end -}}
