"""A Kubernetes manifest for a server: readiness probes, graceful shutdown, and scaling by the length of the queue."""

from __future__ import annotations

import json
from dataclasses import dataclass

DRAIN_SECONDS = 25
"""Maximum seconds that a server takes to shut down, as in `mh.serving.Listen.drain`."""
LEAVING_SECONDS = 5
"""Seconds after which a terminating pod receives no more requests."""


@dataclass(frozen=True, kw_only=True)
class Served:
    """The models to serve, and the resources of the deployment.

    Attributes:
        name: Name of the deployment.
        image: Container image.
        claim: Volume claim with the models.
        pods: Minimum number of pods.
        max_pods: Maximum number of pods.
        gpus: GPUs per pod.
        queue_rows: Average number of rows that wait in a pod, above which pods are added.
    """

    name: str
    image: str
    claim: str
    pods: int
    max_pods: int
    gpus: int
    queue_rows: int


def serving(wanted: Served) -> str:
    """Return a deployment, its services and its autoscaler; the tokens are in a secret of the same name."""
    parts = (
        _deployment(wanted),
        _service(wanted),
        _headless(wanted),
        _disruption(wanted),
        _monitor(wanted),
        _scaling(wanted),
    )
    head = (
        f"# kubectl create secret generic {wanted.name} --from-file=token=<(openssl rand -hex 32 | tr -d '\\n') \\\n"
        "#   --from-file=manage-token=<(openssl rand -hex 32 | tr -d '\\n')\n"
        "# PodMonitor needs Prometheus' operator; the scaling by queue needs its adapter for custom metrics.\n"
    )
    return head + "---\n".join(parts)


def _deployment(wanted: Served) -> str:
    gpus = f"\n          limits:\n            nvidia.com/gpu: {wanted.gpus}" if wanted.gpus else ""
    return f"""apiVersion: apps/v1
kind: Deployment
metadata:
  name: {wanted.name}
  labels: {{app: {wanted.name}}}
spec:
  replicas: {wanted.pods}
  selector:
    matchLabels: {{app: {wanted.name}}}
  strategy:
    rollingUpdate: {{maxUnavailable: 0, maxSurge: 1}}
  template:
    metadata:
      labels: {{app: {wanted.name}}}
    spec:
      # Not ready, then the requests that are there, then the end.
      terminationGracePeriodSeconds: {LEAVING_SECONDS + DRAIN_SECONDS + 15}
      automountServiceAccountToken: false
      securityContext:
        runAsNonRoot: true
        runAsUser: 10001
        seccompProfile: {{type: RuntimeDefault}}
      containers:
      - name: serve
        image: {json.dumps(wanted.image)}
        args: ["serve", "/models", "--quiet"]
        env:
        - {{name: MANYHANDS_HOST, value: "0.0.0.0"}}
        - name: MANYHANDS_TOKEN
          valueFrom: {{secretKeyRef: {{name: {wanted.name}, key: token}}}}
        # Management listens inside the pod only: kubectl exec POD -- manyhands models list
        - name: MANYHANDS_MANAGE_TOKEN
          valueFrom: {{secretKeyRef: {{name: {wanted.name}, key: manage-token}}}}
        ports:
        - {{name: grpc, containerPort: 8500}}
        - {{name: http, containerPort: 8501}}
        startupProbe:
          httpGet: {{path: /v2/health/ready, port: http}}
          periodSeconds: 2
          failureThreshold: 300
        readinessProbe:
          httpGet: {{path: /v2/health/ready, port: http}}
          periodSeconds: 2
          failureThreshold: 2
        livenessProbe:
          httpGet: {{path: /v2/health/live, port: http}}
          periodSeconds: 10
          timeoutSeconds: 5
          failureThreshold: 6
        lifecycle:
          preStop:
            exec: {{command: ["sleep", "{LEAVING_SECONDS}"]}}
        securityContext:
          allowPrivilegeEscalation: false
          readOnlyRootFilesystem: true
          capabilities: {{drop: ["ALL"]}}
        resources:
          requests: {{cpu: "2", memory: 2Gi}}{gpus}
        volumeMounts:
        - {{name: models, mountPath: /models, readOnly: true}}
        - {{name: tmp, mountPath: /tmp}}
      volumes:
      - name: models
        persistentVolumeClaim: {{claimName: {wanted.claim}, readOnly: true}}
      - name: tmp
        emptyDir: {{}}
"""


def _service(wanted: Served) -> str:
    return f"""apiVersion: v1
kind: Service
metadata:
  name: {wanted.name}
spec:
  selector: {{app: {wanted.name}}}
  ports:
  - {{name: grpc, port: 8500, targetPort: grpc}}
  - {{name: http, port: 8501, targetPort: http}}
"""


def _headless(wanted: Served) -> str:
    return f"""# A name for all pods: manyhands serve --router --backends {wanted.name}-pods:8500
apiVersion: v1
kind: Service
metadata:
  name: {wanted.name}-pods
spec:
  clusterIP: None
  selector: {{app: {wanted.name}}}
  ports:
  - {{name: grpc, port: 8500, targetPort: grpc}}
  - {{name: http, port: 8501, targetPort: http}}
"""


def _disruption(wanted: Served) -> str:
    return f"""apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {wanted.name}
spec:
  maxUnavailable: 1
  selector:
    matchLabels: {{app: {wanted.name}}}
"""


def _monitor(wanted: Served) -> str:
    return f"""apiVersion: monitoring.coreos.com/v1
kind: PodMonitor
metadata:
  name: {wanted.name}
spec:
  selector:
    matchLabels: {{app: {wanted.name}}}
  podMetricsEndpoints:
  - port: http
    path: /metrics
    interval: 5s
    authorization:
      credentials: {{name: {wanted.name}, key: token}}
"""


def _scaling(wanted: Served) -> str:
    return f"""apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {wanted.name}
spec:
  scaleTargetRef: {{apiVersion: apps/v1, kind: Deployment, name: {wanted.name}}}
  minReplicas: {wanted.pods}
  maxReplicas: {wanted.max_pods}
  metrics:
  - type: Pods
    pods:
      metric: {{name: manyhands_queue_rows}}
      target: {{type: AverageValue, averageValue: "{wanted.queue_rows}"}}
  behavior:
    scaleUp: {{stabilizationWindowSeconds: 0}}
    scaleDown: {{stabilizationWindowSeconds: 300}}
"""
