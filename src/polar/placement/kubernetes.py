"""Manifests for Kubernetes: the rollout server (a Deployment) and the gateways (a StatefulSet).

Each gateway keeps its name and its journal over restarts. A pod that is to end gets SIGTERM, which drains it, and the
grace period is longer than a drain may take. Tokens come from a Secret that is made by hand.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import yaml

from polar.rollout.auth import ADMIN_ENV, CALLBACK_ENV, NODE_ENV
from polar.settings import ServeConfig

_HEADER = """\
# The rollout server of Polar and {gateways} gateways. Made by polar up --kubernetes; change and apply it as you like.
# Before: a Secret "polar" with the keys {keys}, from files that hold nothing else, such as
#   kubectl create secret generic polar {files}
{sandbox}"""
_SANDBOX = """\
# The sandbox of agents (bubblewrap) makes namespaces of its own, which a container's default seccomp profile and its
# masked /proc forbid. So the gateways' pods have user namespaces (hostUsers: false; Kubernetes 1.33 and later), no
# seccomp and AppArmor profile, and an unmasked /proc: the "privileged" level of Pod Security, but no root and no
# privileged container.
"""
_PORT = 8080
_USER = 1000


def manifests(config: ServeConfig, *, image: str, gateways: int, store: str | None = None) -> str:
    """YAML for ``kubectl apply -f -``.

    Args:
        config: the settings of a gateway.
        image: has ``polar`` in its PATH.
        store: a PostgreSQL database, for two servers; without one there is one, with a file on a volume.
    """
    keys = ["admin", "node", "callback", *(["store-password"] if store else [])]
    header = _HEADER.format(
        gateways=gateways,
        keys=", ".join(keys),
        files=" ".join(f"--from-file={key}" for key in keys),
        sandbox=_SANDBOX if _sandboxed(config) else "",
    )
    objects = [
        *_server(image, store),
        _config_map(config),
        _service("polar-gateways", headless=True),
        _gateways(config, image, gateways),
    ]
    return header + "".join("---\n" + yaml.safe_dump(each, sort_keys=False) for each in objects)


def _sandboxed(config: ServeConfig) -> bool:
    return config.runtimes.sandbox == "bubblewrap"


# ---- the rollout server ----------------------------------------------------------------------------------


def _server(image: str, store: str | None) -> list[dict[str, Any]]:
    args = ["serve", "--role", "rollout", "--host", "0.0.0.0", "--insecure", "--port", str(_PORT), "--out", "/data"]
    env = [_secret(ADMIN_ENV, "admin"), _secret(NODE_ENV, "node"), _secret(CALLBACK_ENV, "callback")]
    volume: dict[str, Any] = {"name": "data", "emptyDir": {}}
    claims = []
    if store is not None:
        args += ["--store", store]
        env.append(_secret("PGPASSWORD", "store-password"))
    else:
        volume = {"name": "data", "persistentVolumeClaim": {"claimName": "polar"}}
        claims = [{**_head("v1", "PersistentVolumeClaim", "polar"), "spec": _claim("20Gi")}]
    container = _container("server", image, args, env)
    deployment = {
        **_head("apps/v1", "Deployment", "polar"),
        "spec": {
            "replicas": 2 if store else 1,
            # A file has one writer: the next server begins when the one before has ended.
            "strategy": {"type": "RollingUpdate" if store else "Recreate"},
            "selector": {"matchLabels": {"app": "polar"}},
            "template": {
                "metadata": {"labels": {"app": "polar"}},
                "spec": {**_pod(), "containers": [container], "volumes": [volume]},
            },
        },
    }
    return [*claims, _service("polar"), deployment]


# ---- gateways --------------------------------------------------------------------------------------------


def _config_map(config: ServeConfig) -> dict[str, Any]:
    ours = {"role", "host", "port", "server", "node_id", "public_url", "out"}
    plain = msgspec.to_builtins(config)
    defaults = msgspec.to_builtins(ServeConfig())
    said = {name: value for name, value in plain.items() if name not in ours and value != defaults[name]}
    return {
        **_head("v1", "ConfigMap", "polar-gateway"),
        "data": {"polar.yaml": yaml.safe_dump(said, sort_keys=False)},
    }


def _gateways(config: ServeConfig, image: str, gateways: int) -> dict[str, Any]:
    scheme = "https" if config.tls else "http"
    args = ["serve", "-c", "/etc/polar/polar.yaml", "--role", "gateway", "--server", config.server or ""]
    args += ["--host", "0.0.0.0", "--port", str(_PORT), "--public-url", f"{scheme}://$(POD_IP):{_PORT}"]
    args += ["--node-id", "$(POD_NAME)", "--out", "/data"]
    env = [_field("POD_NAME", "metadata.name"), _field("POD_IP", "status.podIP"), _secret(NODE_ENV, "node")]
    container = _container("gateway", image, args, env, scheme=scheme)
    container["volumeMounts"].append({"name": "config", "mountPath": "/etc/polar"})
    pod = _pod()
    if _sandboxed(config):
        pod["hostUsers"] = False
        container["securityContext"] = {
            "procMount": "Unmasked",
            "seccompProfile": {"type": "Unconfined"},
            "appArmorProfile": {"type": "Unconfined"},
        }
    return {
        **_head("apps/v1", "StatefulSet", "polar-gateways"),
        "spec": {
            "serviceName": "polar-gateways",
            "replicas": gateways,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": {"app": "polar-gateways"}},
            "template": {
                "metadata": {"labels": {"app": "polar-gateways"}},
                "spec": {
                    **pod,
                    "terminationGracePeriodSeconds": math.ceil(config.limits.drain_seconds) + 60,
                    "containers": [container],
                    "volumes": [{"name": "config", "configMap": {"name": "polar-gateway"}}],
                },
            },
            "volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": _claim("20Gi")}],
        },
    }


# ---- parts -----------------------------------------------------------------------------------------------


def _head(version: str, kind: str, name: str) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}}


def _service(name: str, *, headless: bool = False) -> dict[str, Any]:
    spec: dict[str, Any] = {"clusterIP": "None"} if headless else {}
    spec |= {"selector": {"app": name}, "ports": [{"name": "http", "port": _PORT}]}
    return {**_head("v1", "Service", name), "spec": spec}


def _pod() -> dict[str, Any]:
    """No root, no rights in the cluster."""
    return {
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": _USER, "runAsGroup": _USER, "fsGroup": _USER},
    }


def _container(
    name: str, image: str, args: list[str], env: list[dict[str, Any]], *, scheme: str = "http"
) -> dict[str, Any]:
    return {
        "name": name,
        "image": image,
        "command": ["polar"],
        "args": args,
        "env": env,
        "ports": [{"containerPort": _PORT}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": _PORT, "scheme": scheme.upper()}},
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }


def _claim(size: str) -> dict[str, Any]:
    return {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}}


def _secret(name: str, key: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": "polar", "key": key}}}


def _field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
