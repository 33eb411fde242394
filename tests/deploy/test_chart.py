"""The Helm chart: linted, rendered, and validated by Kubernetes' own schemas, for three sets of values.

No cluster is here."""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import subprocess
import sys
import tempfile
import textwrap
import tomllib
from typing import Any

import pytest
from helpers import REPOSITORY, run

from kvfs.cli import settings
from kvfs.cli.command import parser as kvfs_parser
from kvfs.csi.server import parser as plugin_parser

helm = pytest.importorskip("helm_python.chart", reason="helm-python-sdk is not installed: tools/setup --test")
validation = pytest.importorskip(
    "kubernetes_validate", reason="kubernetes-validate is not installed: tools/setup --test"
)
import yaml  # noqa: E402  (kubernetes-validate brings it)

CHART = REPOSITORY / "packaging/chart/kvfs"
IMAGE = {"repository": "registry.example/kvfs"}
BY_ID = "/dev/disk/by-id/nvme-MODEL_SERIAL-0001"

MINIMAL = {"image": IMAGE, "pool": {"files": {"count": 2, "size": "64G"}}}
FULL = {
    "image": {**IMAGE, "tag": "0.1.0-7", "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "registry"}],
    "pool": {
        "name": "fast", "devices": [f"/dev/disk/by-path/pci-0000:0{number}:00.0-nvme-1" for number in (1, 2)],
        "nodes": {"node-a.example": [BY_ID, "nvme-tcp://10.0.0.7:4420/nqn.2026-01.example:a?nsid=1"]},
        "formatArgs": ["--stripe-width", "2"], "directory": "/srv/pools", "mounts": "/mnt/kvfs",
    },
    "daemon": {"staging": "1G", "readMemory": "512M",
               "options": {"io-timeout": 5000, "options": "noexec", "idmap": True},
               "resources": {"requests": {"cpu": "4", "memory": "4Gi"}, "limits": {"memory": "8Gi"}}},
    "hold": {"enabled": True, "timeout": 300},
    "native": {"namespaces": ["team-a", "team-b"]},
    "csi": {"kubelet": "/var/lib/k0s/kubelet", "timeout": 2.5},
    "volumes": [
        {"namespace": "team-a", "claim": "kv"},
        {"namespace": "team-b", "claim": "kv", "directory": "team-a", "readOnly": True},
    ],
    "storageClass": "kvfs",
    "metrics": {"enabled": True, "serviceMonitor": {"enabled": True, "interval": "30s"}},
    "nodeSelector": {"example.com/cache": "yes"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
}  # fmt: skip
# The mount alone: nobody is native, the driver's object and the priority are not ours to choose.
RESTRICTED = {
    "image": IMAGE, "pool": {"nodes": {"node-a": [BY_ID]}}, "native": {"namespaces": []},
    "csi": {"createDriver": False}, "metrics": {"enabled": False}, "priorityClassName": "",
}  # fmt: skip
SETS = pytest.mark.parametrize("values", [MINIMAL, FULL, RESTRICTED], ids=["minimal", "full", "restricted"])


def rendered(values: dict[str, Any]) -> list[dict[str, Any]]:
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values=values, name="kv", namespace="kvfs-system")
    texts = [text for path, text in files.items() if path.endswith(".yaml")]
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


def refused(values: dict[str, Any]) -> str:
    from helm_python.errors import HelmError

    with helm.Chart.load(CHART) as chart, pytest.raises(HelmError) as caught:
        chart.render(values=values, name="kv", namespace="kvfs-system")
    return str(caught.value)


def only(documents: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = [item for item in documents if (item["kind"], item["metadata"]["name"]) == (kind, name)]
    return found


def pod(documents: list[dict[str, Any]], component: str) -> dict[str, Any]:
    return only(documents, "DaemonSet", f"kv-{component}")["spec"]["template"]["spec"]


def container(spec: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [item for item in [*spec.get("initContainers", ()), *spec["containers"]] if item["name"] == name]
    return found


def daemon_arguments(documents: list[dict[str, Any]]) -> argparse.Namespace:
    """The daemon's options as kvfs itself reads them: of its command line, and of the file that kubelet lays there."""
    spec = pod(documents, "daemon")
    serving = container(spec, "daemon")
    given = kvfs_parser().parse_args(serving["args"])
    directory, name = mounted(serving)["options"]["mountPath"], given.config.name
    assert given.config.parent == pathlib.Path(directory)
    (laid,) = [item["configMap"]["name"] for item in spec["volumes"] if item["name"] == "options"]
    with tempfile.TemporaryDirectory() as work:
        given.config = pathlib.Path(work) / name
        given.config.write_text(only(documents, "ConfigMap", laid)["data"][name])
        settings.resolve(given, pathlib.Path(given.pool))
    return given


def mounted(container: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {item["name"]: item for item in container["volumeMounts"]}


def host_paths(spec: dict[str, Any]) -> dict[str, str]:
    return {item["name"]: item["hostPath"]["path"] for item in spec["volumes"] if "hostPath" in item}


def test_chart_and_package_have_one_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert chart["appVersion"] == chart["version"] == project["version"]


@SETS
def test_the_chart_is_linted(values: dict[str, Any]) -> None:
    for version in ("v1.25.0", "v1.37.0"):
        report = helm.lint(CHART, values=values, strict=True, kube_version=version, namespace="kvfs-system")
        assert report["errors"] == [] and report["total_charts_linted"] == 1
        assert [item["error"] for item in report["messages"]] == ["icon is recommended"]


@SETS
def test_every_object_is_valid_for_the_oldest_and_the_newest_kubernetes(values: dict[str, Any]) -> None:
    documents = rendered(values)
    kinds = [document["kind"] for document in documents]
    assert kinds.count("DaemonSet") == 2 + (values is FULL) and kinds.count("CSIDriver") == (values is not RESTRICTED)
    for document in documents:
        if document["kind"] == "ServiceMonitor":  # no schema of custom resources is there
            continue
        for version in ("1.25", "1.37"):
            assert validation.validate(document, version, strict=True) == version


def test_a_wrong_object_would_be_seen() -> None:
    document = only(rendered(MINIMAL), "DaemonSet", "kv-daemon")
    document["spec"]["template"]["spec"]["hostPid"] = True
    with pytest.raises(validation.ValidationError):
        validation.validate(document, "1.37", strict=True)


@SETS
def test_the_commands_take_the_arguments_of_their_containers(values: dict[str, Any]) -> None:
    documents = rendered(values)
    spec = pod(documents, "daemon")
    given = daemon_arguments(documents)
    pool = values["pool"]
    name, mounts = pool.get("name", "default"), pool.get("mounts", "/run/kvfs")
    assert given.foreground and given.allow_other
    assert (given.pool, given.mountpoint) == (f"{pool.get('directory', '/var/lib/kvfs')}/{name}", f"{mounts}/{name}")
    assert (given.metrics is not None) == (values is FULL) and given.log_format == "json"
    assert given.idmap == (values is FULL)
    assert (given.staging, given.read_memory) == ((1 << 30, 512 << 20) if values is FULL else (None, None))
    assert (given.io_timeout, given.options) == ((5000, "noexec") if values is FULL else (None, ""))
    probe = container(spec, "daemon")["readinessProbe"]
    assert probe.get("httpGet", {}).get("path") == ("/readyz" if values is FULL else None)
    assert ("exec" in probe) == (values is not FULL)
    plugin = container(pod(documents, "csi"), "plugin")
    assert plugin["command"] == ["kvfs-csi"]
    said = plugin_parser().parse_args(plugin["args"])
    assert said.mount == given.mountpoint and said.pool_name == name and said.node_id == "$(NODE_NAME)"
    # kubelet and the probe wait longer than the plugin does.
    probe = plugin["readinessProbe"]["timeoutSeconds"]
    (own,) = [word for word in container(pod(documents, "csi"), "livenessprobe")["args"] if "timeout" in word]
    assert said.timeout < int(own.removeprefix("--probe-timeout=").removesuffix("s")) < probe


def test_native_access_is_the_named_namespaces_alone() -> None:
    assert daemon_arguments(rendered(FULL)).native_in == ["/team-a", "/team-b"]
    assert pod(rendered(FULL), "daemon")["hostPID"] is True
    for values in (MINIMAL, RESTRICTED):
        assert daemon_arguments(rendered(values)).native_in == []
        assert "hostPID" not in pod(rendered(values), "daemon")
    # The plugin has neither the pool nor its devices.
    assert set(host_paths(pod(rendered(FULL), "csi"))) == {"plugins", "registration", "kubelet", "mounts"}


@SETS
def test_the_mount_goes_from_the_daemon_to_the_plugin_and_on_to_kubelet(values: dict[str, Any]) -> None:
    documents = rendered(values)
    daemon, csi = pod(documents, "daemon"), pod(documents, "csi")
    serving, plugin = container(daemon, "daemon"), container(csi, "plugin")
    assert host_paths(daemon)["mounts"] == host_paths(csi)["mounts"]
    for name, found in (("serving", mounted(serving)["mounts"]), ("plugin", mounted(plugin)["mounts"])):
        assert found["mountPropagation"] == {"serving": "Bidirectional", "plugin": "HostToContainer"}[name]
        assert found["mountPath"] == host_paths(daemon)["mounts"]
    # Targets are paths of the node: they are the same inside.
    kubelet = values.get("csi", {}).get("kubelet", "/var/lib/kubelet")
    assert mounted(plugin)["kubelet"]["mountPath"] == host_paths(csi)["kubelet"] == kubelet
    assert mounted(plugin)["kubelet"]["mountPropagation"] == "Bidirectional"
    # kubelet finds the socket of which it is told, and both helpers have it.
    (said,) = [word for word in container(csi, "registrar")["args"] if "kubelet-registration-path" in word]
    assert said == f"--kubelet-registration-path={host_paths(csi)['plugins']}/csi.sock"
    for name in ("plugin", "registrar", "livenessprobe"):
        assert mounted(container(csi, name))["plugins"]["mountPath"] == "/csi"
    assert host_paths(csi)["registration"] == f"{kubelet}/plugins_registry"


@SETS
def test_only_what_mounts_is_privileged_and_no_root_is_written(values: dict[str, Any]) -> None:
    documents = rendered(values)
    for component in ("daemon", "csi"):
        spec = pod(documents, component)
        assert spec["automountServiceAccountToken"] is False
        for each in [*spec.get("initContainers", ()), *spec["containers"]]:
            security = each["securityContext"]
            assert security["readOnlyRootFilesystem"] is True
            if each["name"] in ("registrar", "livenessprobe"):
                assert security["capabilities"] == {"drop": ["ALL"]} and not security.get("privileged")
            else:
                assert security["privileged"] is True
            assert {"requests", "limits"} == set(each["resources"])


def test_no_upgrade_ends_a_daemon_by_itself() -> None:
    documents = rendered(MINIMAL)
    assert only(documents, "DaemonSet", "kv-daemon")["spec"]["updateStrategy"] == {"type": "OnDelete"}
    serving = container(pod(documents, "daemon"), "daemon")
    assert "livenessProbe" not in serving
    assert pod(documents, "daemon")["priorityClassName"] == "system-node-critical"


def test_the_driver_object_says_what_the_plugin_does() -> None:
    spec = only(rendered(MINIMAL), "CSIDriver", "csi.kvfs")["spec"]
    assert spec == {
        "attachRequired": False, "podInfoOnMount": True, "fsGroupPolicy": "None",
        "volumeLifecycleModes": ["Ephemeral", "Persistent"],
    }  # fmt: skip


def test_the_holder_and_the_daemon_meet_at_one_socket_and_the_holder_has_no_rights() -> None:
    documents = rendered(FULL)
    spec = pod(documents, "hold")
    holder = container(spec, "hold")
    said = kvfs_parser().parse_args(holder["args"])
    daemon = pod(documents, "daemon")
    assert said.socket == daemon_arguments(documents).hold == "/run/kvfs-hold/fast.sock" and said.timeout == 300
    assert mounted(holder)["hold"] == mounted(container(daemon, "daemon"))["hold"]
    assert host_paths(spec) == {"hold": host_paths(daemon)["hold"]}
    assert holder["securityContext"]["capabilities"] == {"drop": ["ALL"]} and "hostPID" not in spec
    for component in ("daemon", "hold"):
        # Neither ends by itself.
        assert only(documents, "DaemonSet", f"kv-{component}")["spec"]["updateStrategy"] == {"type": "OnDelete"}
    assert daemon_arguments(rendered(MINIMAL)).hold is None


def test_other_options_are_another_pod_of_the_daemon() -> None:
    def template(options: dict[str, Any]) -> dict[str, Any]:
        documents = rendered({**MINIMAL, "daemon": {"options": options}})
        return only(documents, "DaemonSet", "kv-daemon")["spec"]["template"]

    assert template({"slow-ops": 50}) != template({"slow-ops": 60})
    assert template({"slow-ops": 50})["spec"] == template({"slow-ops": 60})["spec"]


def test_more_options_are_those_that_a_file_may_have_and_no_value_sets() -> None:
    """A word that kvfs does not know would be seen as the daemon's pod starts, on one node after the other."""
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]["daemon"]["properties"]["options"]
    given = kvfs_parser().parse_args(["mount", "pool", "mount"])
    elsewhere = {"staging", "read-memory", "log-format", "metrics", "native-in", "hold", "allow-other"}
    assert set(schema["propertyNames"]["enum"]) == set(given.settings.actions) - elsewhere
    assert elsewhere <= set(given.settings.actions)


def test_names_that_look_like_numbers_are_texts_and_fit_into_a_service_s_name() -> None:
    volumes = [{"namespace": "123", "claim": "1e3"}]
    values = {**FULL, "volumes": volumes, "pool": {"nodes": {"12": [BY_ID]}}}
    for release in ("123", "a.b"):
        with helm.Chart.load(CHART) as chart:
            files = chart.render(values=values, name=release, namespace="42")
        texts = [text for path, text in files.items() if path.endswith(".yaml")]
        found = [document for text in texts for document in yaml.safe_load_all(text) if document]
        for document in found:
            if document["kind"] != "ServiceMonitor":
                assert validation.validate(document, "1.37", strict=True) == "1.37"
            assert isinstance(document["metadata"]["name"], str)
            assert document["metadata"].get("namespace", "42") in ("42", "123")
        (service,) = [item["metadata"]["name"] for item in found if item["kind"] == "Service"]
        assert "." not in service


def test_no_two_claims_have_one_volume() -> None:
    volumes = [{"namespace": "a", "claim": "b-c"}, {"namespace": "a-b", "claim": "c"}]
    made = [
        (item["metadata"]["name"], item["spec"]["csi"]["volumeHandle"])
        for item in rendered({**MINIMAL, "volumes": volumes})
        if item["kind"] == "PersistentVolume"
    ]
    assert made == [("kv-a.b-c", "a.b-c"), ("kv-a-b.c", "a-b.c")]


def test_each_volume_has_its_claim() -> None:
    from kvfs.csi.messages import PublishRequest
    from kvfs.csi.node import namespace_of

    documents = rendered(FULL)
    assert only(documents, "StorageClass", "kvfs")["provisioner"] == "kubernetes.io/no-provisioner"
    for namespace, read_only in (("team-a", False), ("team-b", True)):
        volume = only(documents, "PersistentVolume", f"kv-{namespace}.kv")["spec"]
        (claim,) = [
            item for item in documents
            if item["kind"] == "PersistentVolumeClaim" and item["metadata"]["namespace"] == namespace
        ]  # fmt: skip
        assert volume["claimRef"] == {"namespace": namespace, "name": claim["metadata"]["name"]}
        assert claim["spec"]["volumeName"] == f"kv-{namespace}.kv"
        for name in ("accessModes", "storageClassName"):
            assert volume[name] == claim["spec"][name]
        assert volume["csi"]["readOnly"] is read_only
        asked = PublishRequest(
            volume_id=volume["csi"]["volumeHandle"], volume_context=volume["csi"]["volumeAttributes"]
        )
        assert namespace_of(asked) == "team-a"
        (term,) = volume["nodeAffinity"]["required"]["nodeSelectorTerms"]
        assert term["matchExpressions"] == [{"key": "topology.csi.kvfs/pool", "operator": "In", "values": ["fast"]}]


def test_prometheus_finds_the_daemon_s_port() -> None:
    documents = rendered(FULL)
    service = only(documents, "Service", "kv-metrics")
    labels = only(documents, "DaemonSet", "kv-daemon")["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    monitor = only(documents, "ServiceMonitor", "kv")["spec"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (port,), (scraped,) = service["spec"]["ports"], monitor["endpoints"]
    (own,) = container(pod(documents, "daemon"), "daemon")["ports"]
    assert port["name"] == scraped["port"] and port["targetPort"] == own["name"] and own["containerPort"] == 9464
    assert scraped["interval"] == "30s"


@pytest.mark.parametrize(("change", "words"), [
    ({"image": {}}, ("/image/repository",)),
    ({"pool": {}}, ("pool has no devices: give pool.devices, pool.nodes or pool.files",)),
    ({"pool": {"devices": []}}, ("pool has no devices",)),
    ({"pool": {"nodes": {"node-a": []}}}, ("/pool/nodes/node-a", "minItems")),
    ({"pool": {"devices": [BY_ID], "files": {"count": 1, "size": "1G"}}}, ("either pool.files or pool.devices",)),
    ({"pool": {"files": {"count": 1}}}, ("/pool/files", "size")),
    ({"pool": {"devices": ["/dev/../etc/passwd"]}}, ("/pool/devices/0", "/dev/../etc/passwd")),
    ({"pool": {"devices": ["nvme1n1"]}}, ("/pool/devices/0", "nvme1n1")),
    ({"pool": {"devices": [BY_ID, BY_ID]}}, ("/pool/devices", "equal")),
    ({"pool": {"devices": [BY_ID], "name": "a/b"}}, ("/pool/name", "a/b")),
    ({"pool": {"devices": [BY_ID], "mounts": "run/kvfs"}}, ("/pool/mounts", "run/kvfs")),
    ({"pool": {"devices": [BY_ID], "mounts": "/srv/../x"}}, ("/pool/mounts", "/srv/../x")),
    ({"pool": {"devices": [BY_ID], "mounts": "/srv", "directory": "/srv/pools"}}, ("/srv/pools lies in", "/srv")),
    ({"native": {"namespaces": [".."]}}, ("/native/namespaces/0", "'..'")),
    ({"native": {"namespaces": ["team-a/.."]}}, ("/native/namespaces/0", "'team-a/..'")),
    ({"native": {"namespaces": ["/"]}}, ("/native/namespaces/0", "'/'")),
    ({"native": {"namespace": ["team-a"]}}, ("/native", "'namespace'")),
    ({"daemon": {"staging": "256Mi"}}, ("/daemon/staging", "256Mi")),
    ({"daemon": {"options": {"io_timeout": 5}}}, ("propertyName", "'io_timeout'", "'io-timeout'")),
    ({"daemon": {"options": {"options": {}}}}, ("/daemon/options/options",)),
    ({"csi": {"timeout": 0}}, ("/csi/timeout", "0.1")),
    ({"csi": {"timeout": 61}}, ("/csi/timeout", "60")),
    ({"csi": {"kubelet": "/"}}, ("/csi/kubelet", "'/'")),
    ({"volumes": [{"namespace": "..", "claim": "kv"}]}, ("/volumes/0/namespace", "'..'")),
    ({"volumes": [{"namespace": "team-a", "claim": "kv", "directory": ".."}]}, ("/volumes/0/directory", "'..'")),
    ({"volumes": [{"namespace": "team-a"}]}, ("/volumes/0", "claim")),
    ({"volumes": [{"namespace": "team-a", "claim": "kv"}], "csi": {"enabled": False}}, ("volumes need csi.enabled",)),
    ({"metrics": {"port": 70000}}, ("/metrics/port", "65,535")),
    ({"metrics": {"serviceMonitor": {"enabled": True}}}, ("needs metrics.enabled",)),
    ({"hold": {"timeout": 0}}, ("/hold/timeout", "minimum")),
    ({"replicas": 2}, ("'replicas'",)),
    ({"daemon": {"options": {"hold": "/run/a"}}}, ("propertyName", "'hold'")),
    ({"daemon": {"options": {"request-timeout": 60}}, "hold": {"enabled": True}}, ("request-timeout: with hold",)),
    ({"volumes": [{"namespace": "a", "claim": "b", "directory": name} for name in "cd"]}, ("a/b is there twice",)),
])  # fmt: skip
def test_values_that_make_no_sense_are_refused_by_their_name(change: dict[str, Any], words: tuple[str, ...]) -> None:
    said = refused({**MINIMAL, **change})
    for word in words:
        assert word in said


def yaml_of_the_page(begins: str) -> dict[str, Any]:
    """The indented text of docs/kubernetes.md that begins so."""
    page = (REPOSITORY / "docs/kubernetes.md").read_text()
    lines = page[page.index(f"    {begins}") :].splitlines()
    part = list(itertools.takewhile(lambda line: line.startswith("    "), lines))
    return yaml.safe_load(textwrap.dedent("\n".join(part)))


def test_the_page_s_values_render_and_its_pod_is_valid() -> None:
    kinds = [document["kind"] for document in rendered(yaml_of_the_page("   image: {repository"))]
    assert kinds.count("PersistentVolumeClaim") == 1 and kinds.count("DaemonSet") == 2
    engine = yaml_of_the_page("   apiVersion: v1\n       kind: Pod")
    assert validation.validate(engine, "1.37", strict=True) == "1.37"
    assert "nvidia.com/gpu" in engine["spec"]["containers"][0]["resources"]["limits"]
    tiers = json.loads(engine["spec"]["containers"][0]["args"][-1])["kv_connector_extra_config"]["secondary_tiers"]
    assert tiers[0]["root_dir"].startswith(engine["spec"]["containers"][0]["volumeMounts"][0]["mountPath"] + "/")


def nodes_of(values: dict[str, Any], work: pathlib.Path) -> pathlib.Path:
    """The configuration as kubelet lays it: a file for each key."""
    data = only(rendered(values), "ConfigMap", "kv-pool")["data"]
    nodes = work / "nodes"
    nodes.mkdir()
    for name, text in data.items():
        (nodes / name).write_text(text)
    return nodes


def formatted(values: dict[str, Any], node: str, work: pathlib.Path, program: str) -> subprocess.CompletedProcess[str]:
    """The init container's work on a node, with a `kvfs` that is this shell text."""
    nodes = work / "nodes" if (work / "nodes").exists() else nodes_of(values, work)
    first = container(pod(rendered(values), "daemon"), "format")
    script, name, *words = first["args"]
    assert "$(" not in script, "kubelet would expand it"
    own = {
        "/etc/kvfs/nodes": str(nodes),
        "$(NODE_NAME)": node,
        words[2]: str(work / "pool"),
        words[3]: str(work / "mount"),
    }
    kvfs = work / "bin/kvfs"
    kvfs.parent.mkdir(exist_ok=True)
    kvfs.write_text(f"#!/bin/sh\n{program}\n")
    kvfs.chmod(0o755)
    command = [*first["command"], script, name, *(own.get(word, word) for word in words)]
    return run(*command, environment={"PATH": f"{kvfs.parent}:/usr/bin:/bin"}, check=False)


def test_a_node_s_pool_is_made_of_its_own_devices_else_of_all_s(tmp_path: pathlib.Path) -> None:
    tell = 'for word; do echo "$word"; done'
    own = formatted(FULL, "node-a.example", tmp_path, tell).stdout.splitlines()
    start = ["format", str(tmp_path / "pool"), "--stripe-width", "2", "--device"]
    assert own[:5] == start and own[5::2] == FULL["pool"]["nodes"]["node-a.example"]
    other = formatted(FULL, "node-b", tmp_path, tell).stdout.splitlines()
    assert other[:5] == start and other[5::2] == FULL["pool"]["devices"]
    assert (tmp_path / "mount").is_dir()


def test_a_node_without_devices_is_named(tmp_path: pathlib.Path) -> None:
    ended = formatted(RESTRICTED, "node-b", tmp_path, "echo not asked")
    assert ended.returncode == 1 and "node node-b: neither pool.nodes" in ended.stderr and ended.stdout == ""


def test_a_pool_is_made_once(tmp_path: pathlib.Path) -> None:
    values = {**MINIMAL, "pool": {"files": {"count": 1, "size": "256M"}}}
    program = f'cd "{REPOSITORY}" && exec "{sys.executable}" -m kvfs "$@"'
    for made in (True, False):
        ended = formatted(values, "node-a", tmp_path, program)
        assert ended.returncode == 0, ended.stderr
        assert ("256M in all" in ended.stdout) == made
    status = run(sys.executable, "-m", "kvfs", "status", tmp_path / "pool", "-o", "json")
    assert len(json.loads(status.stdout)["devices"]) == 1


def notes(values: dict[str, Any]) -> str:
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values=values, name="kv", namespace="kvfs-system")
    (text,) = [text for path, text in files.items() if path.endswith("NOTES.txt")]
    return text


def test_the_notes_say_whether_engines_pods_must_go_for_an_upgrade() -> None:
    without, held = notes(MINIMAL), notes({**MINIMAL, "hold": {"enabled": True}})
    assert "engines' pods of that node must have gone" in without and "The holder" not in without
    assert "no engine's pod has to go" in held and "must have gone" not in held
