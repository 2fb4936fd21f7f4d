{{/* Of pods that are no replica of the operator: by their component, its selectors don't find them. */}}
{{- define "colocated-rl.pod-labels" -}}
app.kubernetes.io/name: colocated-rl
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: hook
{{- with .Values.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Spec of a pod that runs one module of the operator to its end, with its rights: list of the root context, the module
and its environment. */}}
{{- define "colocated-rl.one-call" -}}
{{- $module := index . 1 -}}
{{- $environment := index . 2 -}}
{{- with index . 0 -}}
restartPolicy: Never
serviceAccountName: {{ include "colocated-rl.service-account" . | quote }}
automountServiceAccountToken: true
{{- with .Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  {{- with .Values.runAsUser }}
  runAsUser: {{ . }}
  runAsGroup: {{ . }}
  {{- end }}
  seccompProfile: {type: RuntimeDefault}
containers:
  - name: {{ $module | replace "_" "-" }}
    image: {{ include "colocated-rl.image" (list . .Values.images.operator) }}
    imagePullPolicy: {{ .Values.images.pullPolicy }}
    command: [python3, -P, -m, colocated_rl_operator.{{ $module }}]
    env:
      {{- range $name, $value := $environment }}
      - {name: {{ $name }}, value: {{ $value | toString | quote }}}
      {{- end }}
    resources: {requests: {cpu: 50m, memory: 256Mi}, limits: {memory: 256Mi}}
    securityContext:
      allowPrivilegeEscalation: false
      readOnlyRootFilesystem: true
      capabilities: {drop: [ALL]}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
{{- end -}}
