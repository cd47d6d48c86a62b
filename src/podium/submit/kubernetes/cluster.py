"""The API server of a cluster, by the official client: objects as plain mappings, and errors in one sentence.

The client brings kubeconfig, certificates and tokens; paths are the same for every kind of object, so that kinds of
operators need no classes of their own.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from podium.errors import UserError, system_reason

Tree = dict[str, Any]
_TIMEOUT_S = 30
#: by kind: where its objects are, below /api/v1 or /apis/GROUP/VERSION
_PLURALS = {
    "Job": "jobs",
    "JobSet": "jobsets",
    "TrainJob": "trainjobs",
    "TrainingRuntime": "trainingruntimes",
    "PyTorchJob": "pytorchjobs",
    "ConfigMap": "configmaps",
    "Service": "services",
    "Secret": "secrets",
    "NetworkPolicy": "networkpolicies",
    "Pod": "pods",
}


class Cluster:
    """A namespace of a cluster."""

    def __init__(self, context: str | None = None, namespace: str | None = None) -> None:
        """Read the kubeconfig, or in a pod the service account; raise UserError where there is neither."""
        try:
            from kubernetes import client, config
        except ImportError:
            raise UserError("Kubernetes needs its client: pip install 'podium[kubernetes]'") from None
        configuration = client.Configuration()
        try:
            if context is None and config.incluster_config.SERVICE_HOST_ENV_NAME in os.environ:
                config.load_incluster_config(client_configuration=configuration)
                given = None
            else:
                # The client itself looks at this variable only when it is loaded.
                file = os.environ.get("KUBECONFIG")
                config.load_kube_config(file, context=context, client_configuration=configuration)
                given = _namespace_of(config.list_kube_config_contexts(file), context)
        except config.ConfigException as error:
            raise UserError(f"no cluster is configured for kubectl here: {_first_line(error)}") from None
        except Exception as error:  # the client takes what is in the file as it should be
            file = os.environ.get("KUBECONFIG") or "~/.kube/config"
            reason = system_reason(error) if isinstance(error, OSError) else "it is not what kubectl writes"
            raise UserError(f"{file}, the configuration of kubectl, cannot be read: {reason}") from None
        configuration.retries = False
        self.namespace = namespace or given or "default"
        self._api = client.ApiClient(configuration)
        self._pods = client.CoreV1Api(self._api)

    def create(self, manifest: Tree) -> Tree:
        """Create an object; the server refuses what it does not know."""
        return self._call("POST", _path(manifest, self.namespace), body=manifest, query={"fieldValidation": "Strict"})

    def get(self, version: str, kind: str, name: str) -> Tree | None:
        """Return an object, None where there is none of this name."""
        try:
            return self._call("GET", _path({"apiVersion": version, "kind": kind}, self.namespace, name))
        except _NotFound:
            return None

    def pods(self, selector: Mapping[str, str]) -> list[Tree]:
        """Return the pods with these labels, the oldest first."""
        words = ",".join(f"{key}={value}" for key, value in selector.items())
        path = _path({"apiVersion": "v1", "kind": "Pod"}, self.namespace)
        found: list[Tree] = self._call("GET", path, query={"labelSelector": words}).get("items") or []
        return sorted(found, key=lambda pod: (pod["metadata"].get("creationTimestamp", ""), pod["metadata"]["name"]))

    def own(self, manifest: Tree, owner: Tree) -> Tree:
        """Return an object that is removed together with its owner."""
        meta = owner["metadata"]
        reference = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": meta["name"], "uid": meta["uid"]}
        return {**manifest, "metadata": {**manifest["metadata"], "ownerReferences": [reference]}}

    def change(self, version: str, kind: str, name: str, changes: Tree) -> None:
        """Change some fields of an object."""
        path = _path({"apiVersion": version, "kind": kind}, self.namespace, name)
        self._call("PATCH", path, body=changes, content_type="application/merge-patch+json")

    def delete(self, version: str, kind: str, name: str) -> None:
        """Delete an object and what it owns: pods have their grace period to save. Missing ones are no error."""
        path = _path({"apiVersion": version, "kind": kind}, self.namespace, name)
        with suppress(_NotFound):
            self._call("DELETE", path, body={"propagationPolicy": "Background"})

    def log(self, pod: str, container: str, *, follow: bool) -> Iterator[bytes]:
        """Yield what a pod has printed; `follow`: until it ends."""
        with _errors_told(self._api.configuration.host):
            answer = self._pods.read_namespaced_pod_log(
                pod, self.namespace, container=container, follow=follow, _preload_content=False,
                _request_timeout=(_TIMEOUT_S, None),
            )  # fmt: skip
            yield from answer.stream(1 << 14, decode_content=True)

    def _call(
        self,
        method: str,
        path: str,
        *,
        body: Tree | None = None,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> Tree:
        with _errors_told(self._api.configuration.host):
            answer = self._api.call_api(
                path,
                method,
                query_params=list((query or {}).items()),
                header_params={"Accept": "application/json", "Content-Type": content_type},
                body=body,
                auth_settings=["BearerToken"],
                response_type="object",
                _return_http_data_only=True,
                _request_timeout=_TIMEOUT_S,
            )
        assert isinstance(answer, dict)
        return answer


class _NotFound(UserError):
    """There is no object of this name."""


def _path(manifest: Tree, namespace: str, name: str = "") -> str:
    version, plural = manifest["apiVersion"], _PLURALS[manifest["kind"]]
    root = f"/api/{version}" if version == "v1" else f"/apis/{version}"
    return f"{root}/namespaces/{namespace}/{plural}" + (f"/{name}" if name else "")


@contextmanager
def _errors_told(server: str) -> Iterator[None]:
    """Raise what the server or the network answers as one sentence."""
    import urllib3
    from kubernetes.client.exceptions import ApiException

    try:
        yield
    except ApiException as error:
        kind = _NotFound if error.status == 404 else UserError
        raise kind(f"the cluster refuses: {_message(error)}") from None
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise UserError(f"the cluster at {server} cannot be reached: {_first_line(error)}") from None


def _message(error: Any) -> str:
    """Return the server's own words about what is wrong."""
    try:
        told = json.loads(error.body)["message"]
    except (ValueError, TypeError, KeyError):
        told = f"{error.status} {error.reason}"
    return _first_line(told)


def _first_line(error: object) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:500].rstrip(". ") if lines else type(error).__name__


def _namespace_of(known: tuple[list[Tree], Tree], context: str | None) -> str | None:
    contexts, current = known
    found = next((one for one in contexts if one["name"] == context), current)
    namespace: str | None = found.get("context", {}).get("namespace")
    return namespace
