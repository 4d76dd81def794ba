{{/* All take a dict: `root`, and `component` where one is meant. */}}

{{- define "staccato.selector" -}}
app.kubernetes.io/name: staccato
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "staccato.meta" -}}
name: {{ .root.Release.Name }}-{{ .component }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "staccato.selector" . | nindent 2 }}
  app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
  app.kubernetes.io/managed-by: {{ .root.Release.Service }}
  helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{/* `image`: gateway or runtime. */}}
{{- define "staccato.image" -}}
{{- $variant := "" }}
{{- if eq .image "runtime" }}{{ $variant = printf "-%s" .root.Values.runtime.accelerator }}{{ end }}
{{- $tag := .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- $digest := index .root.Values.image.digests .image }}
{{- printf "%s/%s%s:%s" .root.Values.image.registry .image $variant $tag }}{{ with $digest }}@{{ . }}{{ end }}
{{- end }}

{{/* `image`: one of others, with the digest that images.lock has for it. */}}
{{- define "staccato.pinned" -}}
{{- $image := .image }}
{{- $found := $image }}
{{- range .root.Files.Lines "images.lock" }}
{{- $locked := last (splitList "=" .) }}
{{- if hasPrefix (printf "%s@sha256:" $image) $locked }}{{ $found = $locked }}{{ end }}
{{- end }}
{{- $found }}
{{- end }}

{{/* The restricted pod security standard. `user`: 10001 unless said otherwise. */}}
{{- define "staccato.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .user | default 10001 }}
  runAsGroup: {{ .user | default 10001 }}
  fsGroup: {{ .user | default 10001 }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "staccato.spread" -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "staccato.selector" . | nindent 8 }}
{{- end }}

{{- define "staccato.confined" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* A request is a limit for memory; a process may have more CPU than it asks for. */}}
{{- define "staccato.resources" -}}
resources:
  requests: {cpu: {{ .cpu | quote }}, memory: {{ .memory | quote }}}
  limits: {memory: {{ .memory | quote }}}
{{- end }}

{{- define "staccato.bus" -}}
- name: STACCATO_LOG_LEVEL
  value: {{ .root.Values.logLevel }}
- name: STACCATO_SIGNS
  value: /tmp
- name: STACCATO_NATS_URL
  value: {{ include "staccato.natsUrl" .root }}
- name: STACCATO_NATS_REPLICAS
  value: {{ .root.Values.nats.replicas | quote }}
- name: STACCATO_NATS_CREDENTIALS
  value: /run/nats/user.nk
{{- if not .root.Values.tls.plaintext }}
- name: STACCATO_NATS_CA
  value: /run/nats-tls/ca.crt
{{- end }}
{{- with .root.Values.traces.endpoint }}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ . }}
- name: OTEL_TRACES_SAMPLER_ARG
  value: {{ $.root.Values.traces.share | quote }}
{{- end }}
{{- end }}

{{- define "staccato.natsUrl" -}}
{{- $scheme := .Values.tls.plaintext | ternary "nats" "tls" }}
{{- if and (not .Values.nats.enabled) (not .Values.tls.plaintext) (not (hasPrefix "tls://" .Values.nats.url)) }}
{{- fail "nats.url is not tls://…, and the bus carries prompts: give the server a certificate, or set tls.plaintext=true" }}
{{- end }}
{{- if not .Values.nats.enabled }}{{ .Values.nats.url }}
{{- else if eq (int .Values.nats.replicas) 1 }}{{ printf "%s://%s-nats:4222" $scheme .Release.Name }}
{{- else }}
{{- range $number := until (int .Values.nats.replicas) }}
{{- if $number }},{{ end }}{{ printf "%s://%s-nats-%d.%s-nats:4222" $scheme $.Release.Name $number $.Release.Name }}
{{- end }}
{{- end }}
{{- end }}

{{/* `seed`: file of the component's user among those of the secret. */}}
{{- define "staccato.busMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: nats, mountPath: /run/nats/user.nk, subPathExpr: {{ .seed }}, readOnly: true}
{{- if not .root.Values.tls.plaintext }}
- {name: nats-tls, mountPath: /run/nats-tls, readOnly: true}
{{- end }}
{{- end }}

{{- define "staccato.busVolumes" -}}
- {name: tmp, emptyDir: {}}
- name: nats
  secret: {secretName: {{ .root.Values.secrets.nats }}, defaultMode: 288} # 0440
{{- if not .root.Values.tls.plaintext }}
- name: nats-tls
  secret: {secretName: {{ .root.Values.nats.tlsSecret | default .root.Values.secrets.nats }}, items: [{key: ca.crt, path: ca.crt}]}
{{- end }}
{{- end }}

{{/* Files that settings are read from. `keys`: those of the platform's secret that this component needs. */}}
{{- define "staccato.secretVolume" -}}
- name: secrets
  secret:
    secretName: {{ .root.Values.secrets.platform }}
    defaultMode: 288 # 0440
    items:
      {{- range .keys }}
      - {key: {{ . }}, path: {{ . }}}
      {{- end }}
{{- end }}

{{/* By files that the process touches: it listens on no port. `startup`: seconds that it may take. */}}
{{- define "staccato.signs" -}}
startupProbe:
  exec: {command: [probe, ready]}
  periodSeconds: 5
  failureThreshold: {{ div .startup 5 }}
readinessProbe:
  exec: {command: [probe, ready]}
  periodSeconds: 5
livenessProbe:
  exec: {command: [probe, alive]}
  periodSeconds: 10
{{- end }}

{{/* One pod of these at a time may be evicted. */}}
{{- define "staccato.budget" -}}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {{- include "staccato.meta" . | nindent 2 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels: {{- include "staccato.selector" . | nindent 6 }}
{{- end }}

{{- define "staccato.models" -}}
- name: models
  {{- with .root.Values.models }}
  {{- if .existingClaim }}
  persistentVolumeClaim: {claimName: {{ .existingClaim }}, readOnly: {{ $.readOnly }}}
  {{- else }}
  hostPath: {path: {{ .hostPath }}, type: Directory}
  {{- end }}
  {{- end }}
{{- end }}
