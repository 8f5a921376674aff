{{- define "jackstay.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- /* At most 40 characters, so that names with a suffix are valid label values. */ -}}
{{- define "jackstay.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "jackstay.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "jackstay.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "jackstay.selectorLabels" -}}
app.kubernetes.io/name: {{ include "jackstay.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- /* Labels of every object, without those by which pods are selected. */ -}}
{{- define "jackstay.releaseLabels" -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "jackstay.labels" -}}
{{ include "jackstay.selectorLabels" . }}
{{ include "jackstay.releaseLabels" . }}
{{- end -}}

{{- /* Reference of an image. A registry replaces that of the repository. Arguments: root, image (registry, repository, tag,
digest), tag (default) */ -}}
{{- define "jackstay.image" -}}
{{- $repository := .image.repository -}}
{{- with default .image.registry (.root.Values.global).imageRegistry -}}
{{- $host := splitList "/" $repository | first -}}
{{- if and (contains "/" $repository) (or (eq $host "localhost") (contains "." $host) (contains ":" $host)) -}}
{{- $repository = trimPrefix (print $host "/") $repository -}}
{{- end -}}
{{- $repository = printf "%s/%s" (trimSuffix "/" .) $repository -}}
{{- end -}}
{{- if .image.digest -}}
{{ $repository }}@{{ .image.digest }}
{{- else -}}
{{ $repository }}{{ with default .tag .image.tag }}:{{ . }}{{ end }}
{{- end -}}
{{- end -}}

{{- /* The ServiceAccount of the pods; empty for `default`. Its name with discovery is that of earlier versions of the chart. */ -}}
{{- define "jackstay.serviceAccountName" -}}
{{- $account := .Values.serviceAccount -}}
{{- if or $account.name (not $account.create) -}}
{{- $account.name -}}
{{- else -}}
{{- include "jackstay.fullname" . }}{{ if .Values.discovery.enabled }}-discovery{{ end }}
{{- end -}}
{{- end -}}

{{- /* Secrets for pulling images, of the parent chart and of this one. */ -}}
{{- define "jackstay.imagePullSecrets" -}}
{{- range concat (default list (.Values.global).imagePullSecrets) .Values.imagePullSecrets }}
- name: {{ if kindIs "string" . }}{{ . }}{{ else }}{{ .name }}{{ end }}
{{- end -}}
{{- end -}}

{{- /* The configuration. Arguments: root, values (of the component), listener */ -}}
{{- define "jackstay.config" -}}
{{- $values := .root.Values -}}
{{- $address := ternary "127.0.0.1" .values.admin.address (eq .values.admin.address "hostIP") -}}
{{- $upstream := dict "name" "control-plane" "endpoints" $values.apiservers "tls" (dict "ca_file" "/etc/kubernetes/pki/ca.crt") -}}
{{- if $values.discovery.enabled -}}
{{- $_ := set $upstream "discovery" (dict "kubeconfig" "/etc/jackstay/discovery.kubeconfig") -}}
{{- $_ := set $upstream "health" (dict "readyz" (dict "token_file" "/run/secrets/jackstay/token")) -}}
{{- end -}}
{{- $config := dict "admin" (dict "bind" (printf "%s:%d" $address (int .values.admin.port))) "upstreams" (list $upstream) "listeners" (list .listener) -}}
{{- toYaml (mergeOverwrite $config (deepCopy .values.config)) -}}
{{- end -}}

{{- /* The ConfigMap's data. Arguments: as above */ -}}
{{- define "jackstay.configData" -}}
jackstay.yaml: |
  {{- include "jackstay.config" . | nindent 2 }}
{{- if .root.Values.discovery.enabled }}
# jackstay reads only the user; server and CA come from the upstream.
discovery.kubeconfig: |
  apiVersion: v1
  kind: Config
  current-context: discovery
  contexts: [{ name: discovery, context: { cluster: discovery, user: discovery } }]
  clusters: [{ name: discovery, cluster: { server: "https://kubernetes.default.svc" } }]
  users: [{ name: discovery, user: { tokenFile: /run/secrets/jackstay/token } }]
{{- end }}
{{- end -}}

{{- /* Metadata of the pods. Arguments: root, values, component, data (whose change rolls the pods) */ -}}
{{- define "jackstay.podMetadata" -}}
annotations:
  checksum/config: {{ .data | sha256sum }}
  {{- with .values.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
labels:
  {{- include "jackstay.selectorLabels" .root | nindent 2 }}
  app.kubernetes.io/component: {{ .component }}
  {{- with mergeOverwrite (deepCopy .root.Values.commonLabels) .values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- /* Settings that the pods of all components have. Arguments: root, values, name, hostNetwork */ -}}
{{- define "jackstay.podSettings" -}}
{{- if .hostNetwork }}
hostNetwork: true
{{- end }}
dnsPolicy: {{ .values.dnsPolicy }}
priorityClassName: {{ .values.priorityClassName | quote }}
{{- with .values.dnsConfig }}
dnsConfig:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.hostAliases }}
hostAliases:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with include "jackstay.imagePullSecrets" .root }}
imagePullSecrets:
  {{- trim . | nindent 2 }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with include "jackstay.serviceAccountName" .root }}
serviceAccountName: {{ . }}
{{- end }}
# The token for discovery is a volume of its own.
automountServiceAccountToken: {{ .root.Values.serviceAccount.automountServiceAccountToken }}
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .values.terminationGracePeriodSeconds }}
{{- with .values.podSecurityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* The container. Arguments: root, values, sidecar, service (container port of the Service) */ -}}
{{- define "jackstay.container" -}}
{{- $probe := dict "exec" (dict "command" (list "/jackstay" "probe" "livez" "--socket" "/run/jackstay/admin.sock")) -}}
name: jackstay
image: {{ include "jackstay.image" (dict "root" .root "image" .root.Values.image "tag" .root.Chart.AppVersion) | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
{{- if .sidecar }}
restartPolicy: Always
{{- end }}
args: {{ concat (list "run" "--config" "/etc/jackstay/jackstay.yaml") .values.extraArgs | toJson }}
env:
  # The probes below use this socket, which is inside the pod.
  - { name: JACKSTAY__ADMIN__SOCKET, value: /run/jackstay/admin.sock }
  # Shown by `/status` and the admin page.
  - { name: NODE_NAME, valueFrom: { fieldRef: { fieldPath: spec.nodeName } } }
  {{- if eq .values.admin.address "hostIP" }}
  - { name: HOST_IP, valueFrom: { fieldRef: { fieldPath: status.hostIP } } }
  - { name: JACKSTAY__ADMIN__BIND, value: "$(HOST_IP):{{ .values.admin.port }}" }
  {{- end }}
  {{- with .values.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- if or .service (include "jackstay.scraped" .root) }}
# A server-side apply to Kubernetes 1.20 needs the protocol.
ports:
  {{- with .service }}
  - { name: apiserver, containerPort: {{ . }}, protocol: TCP }
  {{- end }}
  {{- if include "jackstay.scraped" .root }}
  - { name: metrics, containerPort: {{ .values.admin.port }}, protocol: TCP }
  {{- end }}
{{- end }}
{{- with .values.securityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.resources }}
resources:
  {{- toYaml . | nindent 2 }}
{{- end }}
startupProbe:
  {{- toYaml $probe | nindent 2 }}
  periodSeconds: 1
  timeoutSeconds: 10
  failureThreshold: 30
livenessProbe:
  {{- toYaml $probe | nindent 2 }}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 3
readinessProbe:
  {{- if and .hostNetwork (has .values.admin.address (list "127.0.0.1" "[::1]")) }}
  httpGet: { host: {{ .values.admin.address | trimAll "[]" | quote }}, port: {{ .values.admin.port }}, path: /readyz, scheme: HTTP }
  {{- else }}
  exec: { command: ["/jackstay", "probe", "readyz", "--socket", "/run/jackstay/admin.sock"] }
  {{- end }}
  periodSeconds: 5
  timeoutSeconds: 3
volumeMounts:
  - { name: config, mountPath: /etc/jackstay, readOnly: true }
  - {{ include "jackstay.caMount" .root }}
  - { name: state, mountPath: /var/lib/jackstay }
  - { name: run, mountPath: /run/jackstay }
  {{- if .root.Values.discovery.enabled }}
  - { name: discovery-token, mountPath: /run/secrets/jackstay, readOnly: true }
  {{- end }}
  {{- with .values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- /* The volume with the CA of the apiservers' certificates. */ -}}
{{- define "jackstay.caVolume" -}}
name: cluster-ca
{{- if .Values.ca.configMap }}
configMap: { name: {{ .Values.ca.configMap }}, items: [{ key: ca.crt, path: ca.crt }] }
{{- else }}
hostPath: { path: {{ .Values.ca.hostPath }}, type: File }
{{- end }}
{{- end -}}

{{- /* Its mount. */ -}}
{{- define "jackstay.caMount" -}}
{{- $path := .Values.ca.configMap | empty | ternary "/etc/kubernetes/pki/ca.crt" "/etc/kubernetes/pki" -}}
{ name: cluster-ca, mountPath: {{ $path }}, readOnly: true }
{{- end -}}

{{- /* Volumes of the container. Arguments: root, values, name (of the ConfigMap) */ -}}
{{- define "jackstay.volumes" -}}
- name: run
  emptyDir: { medium: Memory, sizeLimit: 1Mi }
- name: config
  configMap: { name: {{ .name }} }
-
  {{- include "jackstay.caVolume" .root | nindent 2 }}
- name: state
  emptyDir: { sizeLimit: 1Mi }
{{- if .root.Values.discovery.enabled }}
- name: discovery-token
  projected: { defaultMode: 0444, sources: [{ serviceAccountToken: { path: token } }] }
{{- end }}
{{- with .values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* Not empty if the metrics port has a name, by which a Service or a PodMonitor finds it. */ -}}
{{- define "jackstay.scraped" -}}
{{- $metrics := .Values.metrics -}}
{{- if or $metrics.service.enabled $metrics.serviceMonitor.enabled $metrics.podMonitor.enabled }}true{{ end -}}
{{- end -}}

{{- /* Labels of the pods of `helm test`. Their name keeps Services and monitors from selecting them. */ -}}
{{- define "jackstay.testLabels" -}}
app.kubernetes.io/name: {{ include "jackstay.name" . }}-test
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- /* `helm upgrade --reuse-values` lacks the values that this version adds; without `enabled` every object would be removed. */ -}}
{{- define "jackstay.checkVersion" -}}
{{- if not (hasKey .Values "enabled") -}}
{{- fail "the values are those of an earlier version of this chart (--reuse-values); use --reset-then-reuse-values, which adds the new defaults" -}}
{{- end -}}
{{- end -}}

{{- /* Checks of a component that the schema cannot express. Arguments: root, values, key */ -}}
{{- define "jackstay.validate" -}}
{{- if not (or .root.Values.apiservers .values.config.upstreams) -}}
{{- fail "apiservers: at least one address of an apiserver is required, such as 10.0.0.11:6443" -}}
{{- end -}}
{{- if and (include "jackstay.scraped" .root) (has .values.admin.address (list "127.0.0.1" "[::1]")) -}}
{{- fail (printf "%s.admin.address: metrics: Prometheus cannot reach %s; set hostIP or an address of the node, and restrict the port with a firewall" .key .values.admin.address) -}}
{{- end -}}
{{- if and (eq .values.dnsPolicy "None") (not .values.dnsConfig) -}}
{{- fail (printf "%s.dnsConfig: dnsPolicy None requires name servers" .key) -}}
{{- end -}}
{{- if and .root.Values.discovery.enabled (not (include "jackstay.serviceAccountName" .root)) -}}
{{- fail "serviceAccount.name: discovery needs a ServiceAccount of its own; set the name of the existing one, or serviceAccount.create" -}}
{{- end -}}
{{- if (.values.config.admin).bind -}}
{{- fail (printf "%s.config.admin.bind: set %s.admin.address and %s.admin.port, which the probes and monitors use, too" .key .key .key) -}}
{{- end -}}
{{- end -}}

{{- /* Relabelings of both monitors. `endpoint` of the operator would hide the label of the metrics. */ -}}
{{- define "jackstay.relabelings" -}}
- { action: labeldrop, regex: endpoint }
- { targetLabel: job, replacement: jackstay }
- { sourceLabels: [__meta_kubernetes_pod_node_name, __address__], regex: "(.+);.*:([0-9]+)", replacement: "$1:$2", targetLabel: instance }
{{- end -}}
