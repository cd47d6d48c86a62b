"""The part of Kubernetes that a job needs, on loopback: an API server that refuses what the published schemas refuse,
the controller of Jobs, and nodes that are network namespaces, on which pods really run. A control plane of
Kubernetes itself is in none of the package indexes that tests install from.
"""

import json
import re
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate
from ruamel.yaml import YAML

from podium.rehearse.indexed_job import Attempt, IndexedJob
from tests.support.hosts import HOSTS
from tests.support.sandbox import Sandbox

Tree = dict[str, Any]
TOKEN = secrets.token_hex(16)
VERSION = "1.34"
_PATH = re.compile(
    r"/(api/v1|apis/[^/]+/[^/]+)/namespaces/(?P<namespace>[^/]+)/(?P<plural>[a-z]+)(/(?P<name>[^/]+))?(?P<log>/log)?"
)
_CORE = {"jobs", "configmaps", "services", "secrets", "networkpolicies"}
_INDEX = "batch.kubernetes.io/job-completion-index"


class Refused(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class WaitingPod:
    """A pod that starts once what it refers to is there, as a kubelet has it."""

    def __init__(self, kube: "Kube", pod: Tree, index: int, folder: Path) -> None:
        self._kube, self._pod, self._index, self._folder = kube, pod, index, folder
        self._sandbox: Sandbox | None = None
        self._ended = False

    def exit_code(self) -> int | None:
        if self._sandbox is not None:
            return self._sandbox.exit_code()
        if self._ended:
            return 137
        names = {volume["configMap"]["name"] for volume in self._pod["spec"]["volumes"] if "configMap" in volume}
        wanted = {("ConfigMap", name) for name in names}
        for entry in self._pod["spec"]["containers"][0]["env"]:
            if "valueFrom" in entry:
                wanted.add(("Secret", entry["valueFrom"]["secretKeyRef"]["name"]))
        values = self._kube.values()
        if wanted <= {(kind, name) for kind, name, _ in values}:
            node = self._index % len(self._kube.nodes)
            self._sandbox = Sandbox(
                self._pod, self._folder, self._kube.nodes[node], values, self._kube.addresses(self._pod)
            )
        return None

    @property
    def log(self) -> bytes:
        return b"" if self._sandbox is None else self._sandbox.log.read_bytes()

    @property
    def runs(self) -> bool:
        return self._sandbox is not None

    def terminate(self) -> None:
        self._ended = True
        if self._sandbox is not None:
            self._sandbox.terminate()

    def kill(self) -> None:
        self._ended = True
        if self._sandbox is not None:
            self._sandbox.kill()


class Kube:
    """A cluster of which a test sees everything."""

    def __init__(self, folder: Path, nodes: list[str]) -> None:
        self.folder, self.nodes = folder, nodes
        #: by plural and name
        self.objects: dict[tuple[str, str], Tree] = {}
        self.jobs: dict[str, IndexedJob] = {}
        self.pods: dict[str, tuple[Tree, WaitingPod]] = {}
        #: how the API server was used: method and path of every request
        self.requests: list[str] = []
        self.lock = threading.RLock()
        self._stopping = False
        self._thread = threading.Thread(target=self._control)

    # --- what a kubelet and the name service know -----------------------------------------------------------------

    def values(self) -> dict[tuple[str, str, str], str]:
        found = {}
        for (plural, name), one in self.objects.items():
            if plural in ("configmaps", "secrets"):
                for key, value in {**one.get("data", {}), **one.get("stringData", {})}.items():
                    found[one["kind"], name, key] = value
        return found

    def addresses(self, pod: Tree) -> dict[str, str]:
        """A headless service gives the pods of a job their names; without it they have none."""
        service = pod["spec"].get("subdomain")
        if ("services", service) not in self.objects:
            return {}
        return {f"{service}-{index}.{service}": address for index, address in enumerate(HOSTS)}

    # --- the API ---------------------------------------------------------------------------------------------------

    def create(self, plural: str, manifest: Tree) -> Tree:
        name = manifest["metadata"]["name"]
        if (plural, name) in self.objects:
            raise Refused(409, f'{plural} "{name}" already exists')
        if plural in _CORE:
            try:
                kubernetes_validate.validate(manifest, VERSION, strict=True)
            except kubernetes_validate.ValidationError as error:
                raise Refused(422, f'{manifest["kind"]} "{name}" is invalid: {error.message}') from None
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        made = {
            **manifest,
            "metadata": {**manifest["metadata"], "uid": secrets.token_hex(8), "creationTimestamp": stamp},
        }
        self.objects[plural, name] = made
        if plural == "jobs":
            self.jobs[name] = IndexedJob(made["spec"], lambda index, number: self._pod(name, index), backoff_s=0.5)
        return made

    def delete(self, plural: str, name: str) -> Tree:
        if (plural, name) not in self.objects:
            raise Refused(404, f'{plural} "{name}" not found')
        gone = self.objects.pop((plural, name))
        if plural == "jobs":
            self.jobs[name].delete()
        uid = gone["metadata"]["uid"]
        for key, one in list(self.objects.items()):
            if any(owner["uid"] == uid for owner in one["metadata"].get("ownerReferences", [])):
                self.objects.pop(key, None)
        return gone

    def _pod(self, job: str, index: int) -> WaitingPod:
        template, name = self.objects["jobs", job]["spec"]["template"], f"{job}-{index}-{secrets.token_hex(3)}"
        metadata = {**template["metadata"], "name": f"{job}-{index}", "annotations": {_INDEX: str(index)}}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": metadata,
            "spec": json.loads(json.dumps(template["spec"])),
        }
        (container,) = pod["spec"]["containers"]
        container["env"].append({"name": "JOB_COMPLETION_INDEX", "value": str(index)})
        waiting = WaitingPod(self, pod, index, self.folder / name)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        metadata = {**metadata, "name": name, "uid": name, "creationTimestamp": f"{stamp}-{len(self.pods):06d}"}
        self.pods[name] = ({**pod, "metadata": metadata}, waiting)
        return waiting

    def listed_pods(self, selector: str) -> list[Tree]:
        wanted = dict(part.split("=") for part in selector.split(",") if part)
        pods = [self._shown(pod, waiting) for pod, waiting in self.pods.values()]
        return [pod for pod in pods if pod["metadata"]["labels"] | wanted == pod["metadata"]["labels"]]

    def _shown(self, pod: Tree, waiting: WaitingPod) -> Tree:
        attempt = next((one for job in self.jobs.values() for one in job.attempts if one.pod is waiting), None)
        phase, state = ("Running", {"running": {}}) if waiting.runs else ("Pending", {"waiting": {}})
        if attempt is not None and attempt.code is not None:
            phase = "Failed" if attempt.code else "Succeeded"
            state = {"terminated": {"exitCode": attempt.code}}
        disrupted = attempt is not None and attempt.disrupted
        conditions = [{"type": "DisruptionTarget", "status": "True"}] if disrupted else []
        status = {"phase": phase, "containerStatuses": [{"state": state}], "conditions": conditions}
        return {**pod, "status": status}

    def shown_job(self, name: str) -> Tree:
        job, conditions = self.jobs[name], []
        if job.state in ("done", "failed") and not job.active:
            kind = "Complete" if job.state == "done" else "Failed"
            conditions = [{"type": kind, "status": "True", "reason": job.reason, "message": job.message}]
        status = {"active": len(job.active), "succeeded": len(job.succeeded), "failed": job.failures,
                  "failedIndexes": ",".join(map(str, sorted(job.given_up))), "conditions": conditions}  # fmt: skip
        return {**self.objects["jobs", name], "status": status}

    # --- the controller -------------------------------------------------------------------------------------------

    def _control(self) -> None:
        while not self._stopping:
            with self.lock:
                for job in self.jobs.values():
                    job.step()
            time.sleep(0.02)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._thread.join()
        for _, waiting in self.pods.values():
            waiting.kill()

    def attempts(self, job: str) -> list[Attempt]:
        with self.lock:
            return list(self.jobs[job].attempts)


def _handler(kube: Kube) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self, body: Tree, code: int = 200) -> None:
            data = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _serve(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else {}
            parts = urlsplit(self.path)
            kube.requests.append(f"{self.command} {self.path}")
            try:
                if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                    raise Refused(401, "Unauthorized")
                found = _PATH.fullmatch(parts.path)
                if found is None:
                    raise Refused(404, "the server could not find the requested resource")
                query = {key: values[0] for key, values in parse_qs(parts.query).items()}
                if found["log"]:
                    self._log(found["name"], query)
                    return
                with kube.lock:
                    answer = self._done(found["plural"], found["name"], body, query)
                self._answer(answer)
            except Refused as refused:
                told = {"kind": "Status", "status": "Failure", "message": str(refused), "code": refused.code}
                self._answer(told, refused.code)

        def _done(self, plural: str, name: str | None, body: Tree, query: dict[str, str]) -> Tree:
            if self.command == "POST":
                assert query["fieldValidation"] == "Strict"
                return kube.create(plural, body)
            if plural == "pods":
                return {"kind": "PodList", "items": kube.listed_pods(query.get("labelSelector", ""))}
            assert name is not None
            if self.command == "DELETE":
                return kube.delete(plural, name)
            if (plural, name) not in kube.objects:
                raise Refused(404, f'{plural} "{name}" not found')
            if self.command == "PATCH":
                kube.objects[plural, name]["metadata"].update(body["metadata"])
            return kube.shown_job(name) if plural == "jobs" else kube.objects[plural, name]

        def _log(self, name: str, query: dict[str, str]) -> None:
            waiting, sent = kube.pods[name][1], 0
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            while True:
                ended = waiting.exit_code() is not None
                part = waiting.log[sent:]
                if part:
                    self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                    sent += len(part)
                if ended or query.get("follow", "").lower() != "true":
                    break
                time.sleep(0.02)
            self.wfile.write(b"0\r\n\r\n")

        do_GET = do_POST = do_DELETE = do_PATCH = _serve  # noqa: N815 (what the class asks for)

        def log_message(self, *args: object) -> None:
            pass

    return Handler


@contextmanager
def running_kube(folder: Path, nodes: list[str]) -> Iterator[Kube]:
    """A cluster, and in `folder` a kubeconfig that leads to it."""
    kube = Kube(folder, nodes)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(kube))
    serving = threading.Thread(target=server.serve_forever)
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me", "namespace": "training"}}],
        "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "users": [{"name": "me", "user": {"token": TOKEN}}],
    }
    with (folder / "kubeconfig").open("w") as file:
        YAML().dump(config, file)
    serving.start()
    kube.start()
    try:
        yield kube
    finally:
        kube.stop()
        server.shutdown()
        serving.join()
        server.server_close()
