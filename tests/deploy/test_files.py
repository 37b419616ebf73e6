"""The files of deploy/ fit each other and the server: paths, ports, names, what is mounted where. Read, not run."""

import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployed import DEPLOY, KUBERNETES, ROOT, UNITS, compose, docker, kubernetes, of_kind, read, seconds, unit
from packaging.requirements import Requirement

from quire.frontend.http.api.metrics import metric_names
from quire.frontend.http.api.routes import ROUTES
from quire.frontend.http.server_state import Limits
from quire.frontend.http.store.bounds import MAX_RESPONSES_BYTES

PYPROJECT = (ROOT / "pyproject.toml").read_text()
OPEN = {route.path for route in ROUTES.routes if route.is_open}
PATHS = {route.path for route in ROUTES.routes}
POD = of_kind("Deployment")["spec"]["template"]
CONTAINER = POD["spec"]["containers"][0]


# ------------------------------------------------------------------------------------------------------------- all
def test_every_file_says_how_it_is_used_and_is_in_the_readme() -> None:
    files = [path for path in DEPLOY.rglob("*") if path.is_file()]
    readme = read("README.md")
    for path in files:
        name = path.relative_to(DEPLOY)
        assert f"`{name}`" in readme or f"`{name.parts[0]}/`" in readme or path.name == "README.md", name
        if path.suffix not in (".json", ".md"):
            assert path.read_text().startswith("# "), f"{name} begins without a word"


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.yaml")), ids=lambda path: str(path.relative_to(DEPLOY)))
def test_yaml_has_no_key_twice(path: Path) -> None:
    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
            assert len(set(keys)) == len(keys), f"{path.name}, line {node.start_mark.line + 1}: {keys}"
            return super().construct_mapping(node, deep)

    assert all(document is not None for document in yaml.load_all(path.read_text(), Loader))


# ----------------------------------------------------------------------------------------------------------- Docker
def test_the_build_context_holds_what_the_package_is_made_of_and_no_more() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    folders = {folder.split("/")[0] for folder in tomllib.loads(PYPROJECT)["tool"]["setuptools"]["package-dir"].values()}
    assert kept == {*folders, "pyproject.toml", "constraints.txt", "README.md", "LICENSE"}


def test_the_image_ends_as_a_user_without_rights_and_is_checked_at_an_open_path() -> None:
    stages = docker("FROM")
    assert [stage.split(" AS ")[1] for stage in stages][-2:] == ["gpu", "cpu"]  # the last one is the default
    assert docker("USER") == ["10001:10001"] * 2
    (check,) = docker("HEALTHCHECK")
    (url,) = re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", check)
    assert url[0] == docker("EXPOSE")[0] == "8000" and url[1] in OPEN
    for line in docker("RUN"):
        for extra in re.findall(r"extras\['(\w+)'\]", line):
            assert f"\n{extra} = [" in PYPROJECT
        if "pip install" in line and "--requirement" in line:
            assert "--constraint constraints.txt" in line


def test_the_python_of_the_image_is_one_that_quire_takes() -> None:
    (version,) = re.findall(r"^PYTHON=([\d.]+)", "\n".join(docker("ARG")), re.M)
    (needs,) = re.findall(r'requires-python = "(.*)"', PYPROJECT)
    assert Requirement(f"python{needs}").specifier.contains(version)


# ---------------------------------------------------------------------------------------------------------- compose
def test_compose_names_only_what_it_has() -> None:
    found = compose()
    services = found["services"]
    for name, service in services.items():
        assert service["profiles"] and not service["image"].endswith(":latest") and ":" in service["image"], name
        assert set(service.get("depends_on", {})) <= set(services)
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in found["volumes"], volume
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), f"{name}: {port} is open to the network, without keys"
        build = service.get("build")
        if build is not None:
            assert (DEPLOY / build["context"] / build["dockerfile"]).exists()
            assert f"AS {build['target']}" in read("docker/Dockerfile") and service["image"] == f"quire:{build['target']}"
    scraped = yaml.safe_load(read("prometheus/prometheus.yaml"))["scrape_configs"][0]["dns_sd_configs"][0]
    aliases = {
        alias for service in services.values() for alias in service.get("networks", {}).get("default", {}).get("aliases", [])
    }
    assert set(scraped["names"]) <= {*services, *aliases} and scraped["port"] == 8000


def test_grafana_and_prometheus_find_their_files_where_compose_puts_them() -> None:
    services = compose()["services"]
    mounts = {name: dict(volume.split(":")[:2] for volume in services[name]["volumes"]) for name in ("grafana", "prometheus")}
    (provider,) = yaml.safe_load(read("grafana/provisioning/dashboards/quire.yaml"))["providers"]
    board = mounts["grafana"]["./grafana/quire.json"]
    assert Path(board).parent == Path(provider["options"]["path"])
    assert services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == board
    (source,) = yaml.safe_load(read("grafana/provisioning/datasources/prometheus.yaml"))["datasources"]
    variables = {v["name"]: v for v in json.loads(read("grafana/quire.json"))["templating"]["list"]}
    assert variables["datasource"]["query"] == source["type"] and source["url"] == "http://prometheus:9090"
    rules = yaml.safe_load(read("prometheus/prometheus.yaml"))["rule_files"]
    assert rules == [mounts["prometheus"]["./prometheus/alerts.yaml"]]


# ---------------------------------------------------------------------------------------------------------- systemd
@pytest.mark.parametrize("name", UNITS)
def test_a_unit_ends_its_launcher_only_and_starts_it_again(name: str) -> None:
    settings = unit(name)
    assert settings["KillMode"] == ["mixed"] and settings["Restart"] == ["on-failure"]
    if "/quire serve" in settings["ExecStart"][0]:  # it says when it is ready, and that its loop turns
        assert settings["Type"] == ["notify"] and 0 < int(settings["WatchdogSec"][0]) <= 10 and "ExecReload" in settings
    else:
        assert settings["Type"] == ["exec"]
    assert settings["User"] == ["quire"] and settings["NoNewPrivileges"] == ["yes"]
    assert settings["ExecStart"][0].startswith("/opt/quire/bin/")


def test_frontends_look_for_the_engine_where_it_listens() -> None:
    (listen,) = re.findall(r"--listen (\S+)", unit("quire-engine.service")["ExecStart"][0])
    (engine,) = re.findall(r"--engine (\S+)", unit("quire-frontend@.service")["ExecStart"][0])
    assert listen == engine == f"ipc:///run/{unit('quire-engine.service')['RuntimeDirectory'][0]}/engine.sock"


# ------------------------------------------------------------------------------------------------------- Kubernetes
def test_kubernetes_objects_belong_together() -> None:
    for each in kubernetes():
        assert each["apiVersion"] and each["metadata"]["name"] == "quire"
    labels = POD["metadata"]["labels"]
    assert of_kind("Deployment")["spec"]["selector"]["matchLabels"] == labels
    assert of_kind("Service")["spec"]["selector"] == labels
    assert of_kind("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    assert of_kind("NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == labels
    assert of_kind("ServiceMonitor")["spec"]["selector"]["matchLabels"] == of_kind("Service")["metadata"]["labels"]
    target = of_kind("HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", "quire")


def test_probes_ask_open_paths_at_the_servers_port() -> None:
    config = yaml.safe_load(of_kind("ConfigMap")["data"]["quire.yaml"])
    assert CONTAINER["ports"] == [{"name": "http", "containerPort": config["port"]}] and config["host"] == "0.0.0.0"
    paths = {name: CONTAINER[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {name: get["path"] for name, get in paths.items()} == {
        "startup": "/ready",
        "liveness": "/live",
        "readiness": "/ready",
    }
    assert all(get["port"] == "http" and get["path"] in OPEN for get in paths.values())
    ready = CONTAINER["readinessProbe"]
    assert ready["periodSeconds"] * ready["failureThreshold"] + ready["timeoutSeconds"] < config["drain-delay-s"]
    startup = CONTAINER["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] <= of_kind("Deployment")["spec"]["progressDeadlineSeconds"]
    (service,), (scrape,) = of_kind("Service")["spec"]["ports"], of_kind("ServiceMonitor")["spec"]["endpoints"]
    assert service["targetPort"] == "http" and scrape["port"] == service["name"] and scrape["path"] == "/metrics"
    assert config["metrics-open"] is True


def test_what_is_mounted_is_there_and_the_rest_is_read_only() -> None:
    mounts = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in POD["spec"]["volumes"]}
    config = yaml.safe_load(of_kind("ConfigMap")["data"]["quire.yaml"])
    assert config["api-key-file"] == f"{mounts['keys']}/api-keys"
    assert CONTAINER["args"][CONTAINER["args"].index("--config") + 1] == f"{mounts['config']}/quire.yaml"
    assert CONTAINER["securityContext"]["readOnlyRootFilesystem"] and POD["spec"]["securityContext"]["runAsNonRoot"]
    assert f"{POD['spec']['securityContext']['runAsUser']}:{POD['spec']['securityContext']['runAsGroup']}" in docker("USER")
    assert mounts["cache"] in docker("VOLUME") and CONTAINER["resources"]["limits"]["nvidia.com/gpu"] == "1"
    head = read("kubernetes/quire.yaml")
    assert (
        f"generic {next(v['secret']['secretName'] for v in POD['spec']['volumes'] if 'secret' in v)} --from-file=api-keys="
        in head
    )


def test_a_pod_has_room_for_what_clients_store() -> None:
    """Without --files-dir it is in /tmp, which is memory there."""
    flags = yaml.safe_load(of_kind("ConfigMap")["data"]["quire.yaml"])
    (mount,) = [mount["name"] for mount in CONTAINER["volumeMounts"] if mount["mountPath"] == flags["files-dir"]]
    (volume,) = [volume["emptyDir"] for volume in POD["spec"]["volumes"] if volume["name"] == mount]
    stored = (flags["max-files-mib"] << 20) + MAX_RESPONSES_BYTES
    assert "medium" not in volume and int(volume["sizeLimit"].removesuffix("Gi")) << 30 > stored


def test_the_autoscaler_asks_for_what_the_adapter_makes_of_our_metrics() -> None:
    ours = set(re.findall(r'"(vllm:\w+)"', Path(metric_names.__file__).read_text()))
    made = dict[str, str]()
    for rule in yaml.safe_load(read("kubernetes/prometheus-adapter.yaml"))["rules"]["custom"]:
        (pattern,) = re.findall(r'__name__=~"([^"]+)"', rule["seriesQuery"])
        name = rule["name"]["as"].replace("${1}", r"\1")
        made |= {
            re.sub(rule["name"]["matches"], name, each): rule["metricsQuery"] for each in ours if re.fullmatch(pattern, each)
        }
        assert rule["metricsQuery"].endswith(" by (<<.GroupBy>>)")  # one value a Pod, of several engines, too
    assert made["vllm_num_requests_waiting"].startswith("sum(") and made["vllm_kv_cache_usage_perc"].startswith("max(")
    asked = {metric["pods"]["metric"]["name"] for metric in of_kind("HorizontalPodAutoscaler")["spec"]["metrics"]}
    assert asked == set(made) and len(asked) == 3


def test_nobody_is_woken_for_routes_that_are_not_here() -> None:
    (pattern,) = re.findall(r'status="5xx", handler!~"([^"]+)"', read("prometheus/alerts.yaml"))
    assert {path for path in PATHS if re.fullmatch(pattern, path)} == {route.path for route in ROUTES.routes if route.missing}


def test_the_line_that_makes_a_rule_of_the_alerts_does() -> None:
    text = read("kubernetes/monitoring.yaml")
    line = text[text.index("(printf") : text.index("| kubectl")].replace("\n#", "\n")
    made = subprocess.run(["bash", "-euc", line], cwd=DEPLOY / "kubernetes", capture_output=True, text=True, check=True).stdout
    rule = yaml.safe_load(made)
    assert rule["kind"] == "PrometheusRule" and rule["spec"] == yaml.safe_load(read("prometheus/alerts.yaml"))
    assert set(KUBERNETES) | {"prometheus-adapter.yaml"} == {path.name for path in (DEPLOY / "kubernetes").iterdir()}


# -------------------------------------------------------------------------------------------------------- balancers
@pytest.mark.parametrize("path", ["haproxy/haproxy.cfg", "nginx/nginx.conf"])
def test_a_balancer_knows_our_paths(path: str) -> None:
    text = read(path)
    denied = re.search(r"deny_status 404 if \{ path (.*) \}|location ~ \^/\((metrics.*)\)\$", text)
    assert denied is not None
    names = denied[1].split() if denied[1] else [f"/{name}" for name in denied[2].split("|")]
    assert set(names) <= PATHS and {"/metrics", "/reset_prefix_cache"} <= set(names)
    stores = re.search(r"path_beg (.*) \}|location ~ \^/v1/\((.*)\) \{", text)
    assert stores is not None
    kept = set(stores[1].split() if stores[1] else [f"/v1/{name}" for name in stores[2].split("|")])
    assert kept == {"/v1/files", "/v1/batches", "/v1/responses"}
    assert {p.split("{")[0].rstrip("/") for p in PATHS if p.startswith(("/v1/files", "/v1/batches"))} >= {
        "/v1/files",
        "/v1/batches",
    }


def test_nginx_gives_connections_up_before_the_server_does() -> None:
    upstream = read("nginx/nginx.conf").split("upstream quire {")[1].split("}")[0]
    (keeps,) = re.findall(r"keepalive_timeout (\w+);", upstream)
    assert seconds(keeps) < Limits().keep_alive_timeout_s
