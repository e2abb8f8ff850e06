{{- define "penstock.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* What selects all pods of the release. */}}
{{- define "penstock.ours" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* What selects the pods of one part. Takes (list $ component). */}}
{{- define "penstock.selector" -}}
{{ include "penstock.ours" (first .) }}
app.kubernetes.io/component: {{ last . }}
{{- end -}}

{{/* Labels of an object. Takes (list $ component). */}}
{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/version: {{ (first .).Chart.AppVersion | quote }}
app.kubernetes.io/part-of: penstock
app.kubernetes.io/managed-by: {{ (first .).Release.Service }}
helm.sh/chart: {{ printf "%s-%s" (first .).Chart.Name (first .).Chart.Version }}
{{- end -}}

{{/* Takes (list $ "worker"|"light"). */}}
{{- define "penstock.image" -}}
{{- $ := first . -}}
{{- $image := index $.Values.image (last .) -}}
image: {{ printf "%s:%s" $image.repository ($image.tag | default $.Chart.AppVersion) | quote }}
imagePullPolicy: {{ $image.pullPolicy }}
{{- end -}}

{{/* The pod's own address, as it stands before a port. */}}
{{- define "penstock.ip" -}}
{{ ternary "[$(POD_IP)]" "$(POD_IP)" .Values.ipv6 }}
{{- end -}}

{{/* All routers, by names that stay. */}}
{{- define "penstock.routers" -}}
{{- $name := printf "%s-router" (include "penstock.fullname" .) -}}
{{- range $number := until (int .Values.router.replicas) -}}
{{- if $number }},{{ end }}{{ $name }}-{{ $number }}.{{ $name }}:7000
{{- end -}}
{{- end -}}

{{/* Name of the Secret of keys. */}}
{{- define "penstock.keys" -}}
{{ .Values.keys.existingSecret | default (printf "%s-keys" (include "penstock.fullname" .)) }}
{{- end -}}

{{- define "penstock.hasRedis" -}}
{{- if or .Values.redis.url .Values.redis.existingSecret -}}yes{{- end -}}
{{- end -}}

{{/* Environment of one container. Takes (list $ env). Services read PENSTOCK_SERVICE_... from it. */}}
{{- define "penstock.env" -}}
{{- $ := first . -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- with $.Values.env }}
{{ toYaml . }}
{{- end }}
{{- with last . }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* $(REDIS), to be composed with the number of a database. */}}
{{- define "penstock.redis" -}}
- name: REDIS
  {{- if .Values.redis.existingSecret }}
  valueFrom: {secretKeyRef: {name: {{ .Values.redis.existingSecret }}, key: {{ .Values.redis.key }}}}
  {{- else }}
  value: {{ .Values.redis.url | quote }}
  {{- end }}
{{- end -}}

{{- define "penstock.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{/* What all pods have. Takes (list $ component). */}}
{{- define "penstock.pod" -}}
{{- $ := first . -}}
serviceAccountName: {{ include "penstock.fullname" $ }}
automountServiceAccountToken: false
# Else a Service named penstock-router would put PENSTOCK_ROUTER_PORT into the settings of a router.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: {{ $.Values.runAsUser }}
  runAsGroup: {{ $.Values.runAsUser }}
  fsGroup: {{ $.Values.runAsUser }}
  # Always would open the store's directory to the group at each start, and a store refuses one that others can write.
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with $.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: {{ $.Values.topologySpread.topologyKey }}
    whenUnsatisfiable: {{ $.Values.topologySpread.whenUnsatisfiable }}
    labelSelector:
      matchLabels:
        {{- include "penstock.selector" . | nindent 8 }}
{{- end -}}

{{/* Metadata of a pod. Takes (list $ component further-labels). */}}
{{- define "penstock.podMeta" -}}
labels:
  {{- include "penstock.labels" (list (first .) (index . 1)) | nindent 2 }}
  {{- with index . 2 }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with (first .).Values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/*
Probes of a gRPC service. Takes (dict "root" $ "port" name "startS" seconds "hungS" seconds), and "open" for one that
asks nobody for a certificate. penstock.live says that a process works; the empty name says that it takes requests: one
that drains or waits for others is not to be started again. The kubelet shows no certificate, so services that ask for them are asked by a program of their own pod.
*/}}
{{- define "penstock.grpcProbes" -}}
{{- $guarded := ternary "yes" "" (and .root.Values.memberTls.enabled (not .open)) -}}
startupProbe:
  {{- include "penstock.probe" (dict "root" .root "port" .port "guarded" $guarded "service" "penstock.live") | nindent 2 }}
  periodSeconds: {{ ternary 5 2 (eq $guarded "yes") }}
  {{- if $guarded }}
  timeoutSeconds: 5
  {{- end }}
  failureThreshold: {{ div .startS (ternary 5 2 (eq $guarded "yes")) }}
livenessProbe:
  {{- include "penstock.probe" (dict "root" .root "port" .port "guarded" $guarded "service" "penstock.live") | nindent 2 }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: {{ div .hungS 10 }}
readinessProbe:
  {{- include "penstock.probe" (dict "root" .root "port" .port "guarded" $guarded "service" "") | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 5
{{- end -}}

{{- define "penstock.probe" -}}
{{- if eq .guarded "yes" -}}
exec:
  command:
    - sh
    - -c
    - exec python -m penstock.rpc.probe "{{ ternary "[$POD_IP]" "$POD_IP" .root.Values.ipv6 }}:{{ .port }}"{{ with .service }} {{ . }}{{ end }} --member-tls /member
{{- else -}}
grpc: {port: {{ .port }}{{ with .service }}, service: {{ . }}{{ end }}}
{{- end -}}
{{- end -}}

{{/* The certificate of a role, where services show them: a setting, a mount, a volume. Each takes (list $ role). */}}
{{- define "penstock.memberArgs" -}}
{{- if (first .).Values.memberTls.enabled -}}
- --member-tls=/member
{{- end }}
{{- end -}}

{{- define "penstock.memberMount" -}}
{{- if (first .).Values.memberTls.enabled -}}
- {name: member-{{ last . }}, mountPath: /member, readOnly: true}
{{- end }}
{{- end -}}

{{- define "penstock.memberVolume" -}}
{{- if (first .).Values.memberTls.enabled -}}
- name: member-{{ last . }}
  secret: {secretName: {{ include "penstock.memberSecret" . }}, defaultMode: 288} # 0440
{{- end }}
{{- end -}}

{{- define "penstock.memberSecret" -}}
{{- $ := first . -}}
{{ $.Values.memberTls.secretPrefix | default (printf "%s-member" (include "penstock.fullname" $)) }}-{{ last . }}
{{- end -}}

{{- define "penstock.weightsVolume" -}}
{{- with .Values.model.volume }}
- name: weights
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "penstock.weightsMount" -}}
{{- if .Values.model.volume }}
- {name: weights, mountPath: /weights, readOnly: true}
{{- end }}
{{- end -}}

{{/* The settings of a pool: its own over those of all. Takes (list $ name). */}}
{{- define "penstock.poolValues" -}}
{{- $ := first . -}}
{{- toYaml (mergeOverwrite (deepCopy $.Values.pool) (deepCopy (index $.Values.pools (last .)))) -}}
{{- end -}}

{{/* Deployment, StatefulSet or LeaderWorkerSet. Takes the settings of a pool. */}}
{{- define "penstock.poolKind" -}}
{{- if gt (int .nodes) 1 -}}LeaderWorkerSet{{- else -}}{{ ternary "StatefulSet" "Deployment" (ne .disk.size "") }}{{- end -}}
{{- end -}}

{{- define "penstock.poolApi" -}}
{{ ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" (gt (int .nodes) 1) }}
{{- end -}}

{{/* Most workers of any pool. */}}
{{- define "penstock.mostWorkers" -}}
{{- $most := 0 -}}
{{- range $name, $own := .Values.pools -}}
{{- $pool := include "penstock.poolValues" (list $ $name) | fromYaml -}}
{{- $most = max $most (len $pool.workers) -}}
{{- end -}}
{{ $most }}
{{- end -}}
