{{/* All take a dict: `root`, `component` where one is meant, and `pool` for a pool of nodes. */}}

{{- define "staccato.selector" -}}
app.kubernetes.io/name: staccato
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
staccato/pool: {{ . }}
{{- end }}
{{- end }}

{{- define "staccato.name" -}}
{{ .root.Release.Name }}-{{ .component }}{{ with .pool }}-{{ . }}{{ end }}
{{- end }}

{{- define "staccato.meta" -}}
name: {{ include "staccato.name" . }}
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
  value: {{ .credentials | default "/run/nats/user.nk" }}
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

{{/* `seed`: file of the component's user among those of the secret; without it, the component has other users. */}}
{{- define "staccato.busMounts" -}}
- {name: tmp, mountPath: /tmp}
{{- with .seed }}
- {name: nats, mountPath: /run/nats/user.nk, subPathExpr: {{ . }}, readOnly: true}
{{- end }}
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

{{/* By files that the process touches: it listens on no port. `startup`: seconds that it may take until its sign `sign`. */}}
{{- define "staccato.signs" -}}
startupProbe:
  exec: {command: [probe, {{ .sign | default "ready" }}]}
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

{{/* The pools as JSON, each with what it takes from `runtime`; refuses values that contradict each other. */}}
{{- define "staccato.pools" -}}
{{- $moved := dict "replicas" "pools[].nodes says how many nodes a pool has, each with runtime.perNode runtimes"
  "autoscaling" "pools[].autoscaling says how many nodes of a pool there are at least and at most" }}
{{- range $name, $now := $moved }}
{{- if hasKey $.Values.runtime $name }}{{ fail (printf "runtime.%s is no value any more: %s" $name $now) }}{{ end }}
{{- end }}
{{- $pools := list }}
{{- $scaled := list }}
{{- range .Values.pools }}
{{- $name := .name }}
{{- range $pools }}
{{- if eq .name $name }}{{ fail (printf "pools: two are called %s: give each pool a name of its own" $name) }}{{ end }}
{{- end }}
{{- $pool := mustMergeOverwrite (deepCopy $.Values.runtime) (deepCopy .) }}
{{- $_ := set $pool "autoscaling" (mustMergeOverwrite (dict "kind" "none" "least" 1 "most" 8) (.autoscaling | default dict)) }}
{{- if ne $pool.autoscaling.kind "none" }}{{ $scaled = append $scaled .name }}{{ end }}
{{- if gt (int $pool.autoscaling.least) (int $pool.autoscaling.most) }}
{{- fail (printf "pools: %s has at least %v and at most %v nodes: lower autoscaling.least, or raise autoscaling.most" .name $pool.autoscaling.least $pool.autoscaling.most) }}
{{- end }}
{{- if and (eq $.Values.scheduler.roles "auto") (ne $pool.role "both") }}
{{- fail (printf "pools: %s has the role %s, and scheduler.roles is auto: leave one of the two out" .name $pool.role) }}
{{- end }}
{{- $_ := set $pool "last" (printf "%s-runtime-%s-%d-r%v" $.Release.Name .name (sub (ternary (int .nodes) (int $pool.autoscaling.most) (eq $pool.autoscaling.kind "none")) 1) $pool.perNode) }}
{{- if gt (len $pool.last) 63 }}
{{- fail (printf "pools: a runtime would be called %s, and the bus takes 63 letters: shorten the name of the pool or of the release" $pool.last) }}
{{- end }}
{{- $pools = append $pools $pool }}
{{- end }}
{{- if gt (len $scaled) 1 }}
{{- fail (printf "pools: %s are scaled, and the scheduler wishes one number: leave autoscaling to one pool" (join " and " $scaled)) }}
{{- end }}
{{- dict "pools" $pools | toJson }}
{{- end }}

{{/* Runtimes of pools whose number of nodes is fixed. `pools`: as staccato.pools says. */}}
{{- define "staccato.fixed" -}}
{{- $fixed := 0 }}
{{- range .pools }}
{{- if eq .autoscaling.kind "none" }}{{ $fixed = add $fixed (mul (.nodes | default 1) .perNode) }}{{ end }}
{{- end }}
{{- $fixed }}
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
