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

{{- define "jackstay.labels" -}}
{{ include "jackstay.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- /* image: reference of an image. Arguments: image (repository, tag, digest), tag (default) */ -}}
{{- define "jackstay.image" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}{{ with default .tag .image.tag }}:{{ . }}{{ end }}
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
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
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
{{- if .root.Values.discovery.enabled }}
serviceAccountName: {{ include "jackstay.fullname" .root }}-discovery
{{- end }}
# The token for discovery is a volume of its own.
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .values.terminationGracePeriodSeconds }}
{{- end -}}

{{- /* The container. Arguments: root, values, sidecar, securityContext, service (container port of the Service) */ -}}
{{- define "jackstay.container" -}}
{{- $probe := dict "exec" (dict "command" (list "/jackstay" "probe" "livez" "--socket" "/run/jackstay/admin.sock")) -}}
name: jackstay
image: {{ include "jackstay.image" (dict "image" .root.Values.image "tag" .root.Chart.AppVersion) | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
{{- if .sidecar }}
restartPolicy: Always
{{- end }}
args: ["run", "--config", "/etc/jackstay/jackstay.yaml"]
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
securityContext:
  {{- toYaml .securityContext | nindent 2 }}
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
  {{- if .root.Values.ca.configMap }}
  - { name: cluster-ca, mountPath: /etc/kubernetes/pki, readOnly: true }
  {{- else }}
  - { name: cluster-ca, mountPath: /etc/kubernetes/pki/ca.crt, readOnly: true }
  {{- end }}
  - { name: state, mountPath: /var/lib/jackstay }
  - { name: run, mountPath: /run/jackstay }
  {{- if .root.Values.discovery.enabled }}
  - { name: discovery-token, mountPath: /run/secrets/jackstay, readOnly: true }
  {{- end }}
  {{- with .values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- /* Volumes of the container. Arguments: root, values, name (of the ConfigMap) */ -}}
{{- define "jackstay.volumes" -}}
- name: run
  emptyDir: { medium: Memory, sizeLimit: 1Mi }
- name: config
  configMap: { name: {{ .name }} }
- name: cluster-ca
  {{- if .root.Values.ca.configMap }}
  configMap: { name: {{ .root.Values.ca.configMap }}, items: [{ key: ca.crt, path: ca.crt }] }
  {{- else }}
  hostPath: { path: {{ .root.Values.ca.hostPath }}, type: File }
  {{- end }}
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

{{- /* Checks of a component that the schema cannot express. Arguments: root, values, key */ -}}
{{- define "jackstay.validate" -}}
{{- if not (or .root.Values.apiservers .values.config.upstreams) -}}
{{- fail "apiservers: at least one address of an apiserver is required, such as 10.0.0.11:6443" -}}
{{- end -}}
{{- if and (include "jackstay.scraped" .root) (has .values.admin.address (list "127.0.0.1" "[::1]")) -}}
{{- fail (printf "%s.admin.address: metrics: Prometheus cannot reach %s; set hostIP or an address of the node, and restrict the port with a firewall" .key .values.admin.address) -}}
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
