"""What a class needs and could not be run here: the image's recipe and the chart's values, read as far as that goes."""

import ast
import fnmatch
import os
import re
import shlex
import stat
import subprocess

import pytest
import yaml

from helpers import ROOT

FOLDER = ROOT / "workshop"
VALUES = {name: yaml.safe_load((FOLDER / name).read_text()) for name in ("values.yaml", "values-gpu.yaml")}

# ---- the image -----------------------------------------------------------------------------------------------------

LINES = re.sub(r"\\\n\s*", " ", re.sub(r"^\s*#.*\n", "", (FOLDER / "Dockerfile").read_text(), flags=re.M)).splitlines()
STEPS = [tuple(line.split(maxsplit=1)) for line in LINES if line.strip()]


def words(kind: str) -> list[list[str]]:
    return [shlex.split(rest) for step, rest in STEPS if step == kind]


def sent() -> list[str]:
    """What of the checkout the recipe can copy, by its .dockerignore: all is left out, some let in again."""
    lines = (FOLDER / "Dockerfile.dockerignore").read_text().split()
    assert lines[0] == "*"
    return [line[1:] for line in lines if line.startswith("!")]


def test_the_image_has_cuda_and_an_ordinary_user():
    assert {step for step, _ in STEPS} <= {"ARG", "FROM", "RUN", "COPY", "WORKDIR", "ENV", "USER", "EXPOSE", "CMD"}
    assert words("FROM") == [["nvidia/cuda:${CUDA}-base-ubuntu24.04"]]
    uid, gid = words("USER")[-1][0].split(":")
    assert [uid, gid] == [str(VALUES["values.yaml"]["singleuser"][key]) for key in ("uid", "fsGid")] != ["0", "0"]
    assert [step for step, _ in STEPS].index("USER") > max(i for i, (step, _) in enumerate(STEPS) if step == "RUN")


def test_the_image_has_the_course_without_solutions_and_the_pinned_environment():
    copied = [source for line in words("COPY") for source in line[:-1]]
    assert all((ROOT / source).exists() for source in copied)
    assert {source.split("/")[0] for source in copied} <= set(sent())
    assert {"helpers", "jupyter", "labs", "notebooks", "constraints.txt"} <= set(copied)
    assert not {"solutions", "tests", "work", ".git", ".venv", "workshop"} & {*sent(), *copied}
    [made] = [rest for _, rest in STEPS if "make install" in rest]
    assert "--add hub" in made and "--add cluster" in made


def test_a_container_starts_as_the_hub_starts_a_server():
    home = VALUES["values.yaml"]["singleuser"]["storage"]["homeMountPath"]
    assert words("WORKDIR")[-1] == [home]
    assert any(f"HELPERS_WORK={home}/work" in line for line in words("ENV"))
    [command] = [ast.literal_eval(rest) for step, rest in STEPS if step == "CMD"]
    assert command[:5] == VALUES["values.yaml"]["singleuser"]["cmd"] == ["python", "-m", "helpers", "lab", "--"]


# ---- the chart's values --------------------------------------------------------------------------------------------

KNOWN = """
hub.config.* hub.extraEnv.* hub.extraConfig.* hub.concurrentSpawnLimit hub.networkPolicy.enabled
proxy.https.enabled proxy.https.type proxy.https.hosts proxy.chp.networkPolicy.enabled
singleuser.image.name singleuser.image.tag singleuser.cmd singleuser.uid singleuser.fsGid
singleuser.allowPrivilegeEscalation singleuser.startTimeout singleuser.cpu.guarantee singleuser.cpu.limit
singleuser.memory.guarantee singleuser.memory.limit singleuser.storage.homeMountPath singleuser.storage.capacity
singleuser.storage.extraVolumes singleuser.storage.extraVolumeMounts singleuser.cloudMetadata.blockWithIptables
singleuser.networkPolicy.enabled singleuser.networkPolicy.egress singleuser.networkPolicy.egressAllowRules.*
singleuser.profileList cull.enabled cull.every cull.timeout cull.maxAge cull.users
prePuller.hook.enabled prePuller.continuous.enabled
"""
"""Of the keys that the chart had in version 4.1.0, read in its values.yaml, those used here. A key check, no schema."""
RULES = {"cloudMetadataServer", "dnsPortsCloudMetadataServer", "dnsPortsKubeSystemNamespace", "dnsPortsPrivateIPs"}
RULES |= {"nonPrivateIPs", "privateIPs"}
OVERRIDES = {"extra_resource_limits", "extra_resource_guarantees", "mem_guarantee", "mem_limit", "cpu_guarantee"}
OVERRIDES |= {"cpu_limit"}
"""What of KubeSpawner a profile sets."""


def leaves(values, path=""):
    """(dotted key, value) of all that is no mapping; lists are values."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


@pytest.mark.parametrize("name", VALUES)
def test_the_chart_has_every_key(name):
    keys = [key for key, _ in leaves(VALUES[name])]
    assert not [key for key in keys if not any(fnmatch.fnmatch(key, known) for known in KNOWN.split())]
    assert set(VALUES[name]["singleuser"].get("networkPolicy", {}).get("egressAllowRules", {})) <= RULES


def test_no_secret_stands_in_the_values():
    for name, values in VALUES.items():
        for key, value in leaves(values):
            assert not re.search(r"(?i)(secret|password|token|client_id)[a-z_]*$", key), (name, key)
            assert not re.search(r"[0-9a-f]{32}", str(value)), (name, key)
    names = {value["valueFrom"]["secretKeyRef"]["name"] for value in VALUES["values.yaml"]["hub"]["extraEnv"].values()}
    assert names == {"room"}
    keys = {value["valueFrom"]["secretKeyRef"]["key"] for value in VALUES["values.yaml"]["hub"]["extraEnv"].values()}
    runbook = (FOLDER / "README.md").read_text()
    assert all(f"`{key}`" in runbook for key in keys)
    [code] = VALUES["values.yaml"]["hub"]["extraConfig"].values()
    assert set(re.findall(r'os\.environ\["(\w+)"\]', code)) <= set(VALUES["values.yaml"]["hub"]["extraEnv"])
    ast.parse(code)


def test_learners_are_walled_in_limited_and_stopped_when_idle():
    one = VALUES["values.yaml"]["singleuser"]
    assert one["networkPolicy"]["enabled"] and not one["allowPrivilegeEscalation"]
    assert not any(one["networkPolicy"]["egressAllowRules"].values())
    assert all(rule["to"] and rule["ports"] for rule in one["networkPolicy"]["egress"])
    assert one["cpu"]["limit"] and one["memory"]["limit"] and one["storage"]["capacity"]
    cull = VALUES["values.yaml"]["cull"] | VALUES["values-gpu.yaml"]["cull"]
    assert cull["enabled"] and not cull["users"] and 0 < cull["every"] < cull["timeout"]


def test_times_are_for_whole_gpus():
    cpu, share, whole = VALUES["values-gpu.yaml"]["singleuser"]["profileList"]
    assert [profile.get("default", False) for profile in (cpu, share, whole)] == [True, False, False]
    assert "kubespawner_override" not in cpu
    for profile in (share, whole):
        override = profile["kubespawner_override"]
        assert set(override) == OVERRIDES
        assert override["extra_resource_limits"] == override["extra_resource_guarantees"]
    assert whole["kubespawner_override"]["extra_resource_limits"] == {"nvidia.com/gpu": "1"}
    [part] = share["kubespawner_override"]["extra_resource_limits"]
    assert re.fullmatch(r"nvidia\.com/(mig-\dg\.\d+gb|gpu\.shared)", part)
    slicing = yaml.safe_load((FOLDER / "gpu-time-slicing.yaml").read_text())["sharing"]["timeSlicing"]
    assert slicing["renameByDefault"]  # to nvidia.com/gpu.shared, so that no share passes for a whole GPU
    assert [resource["name"] for resource in slicing["resources"]] == ["nvidia.com/gpu"]


# ---- one machine ---------------------------------------------------------------------------------------------------


def test_the_configuration_lists_what_it_takes_from_the_environment():
    text = (FOLDER / "jupyterhub_config.py").read_text()
    listed = set(re.findall(r"HUB_[A-Z_]+", ast.get_docstring(ast.parse(text))))
    assert listed == set(re.findall(r'environ\.get\("(HUB_[A-Z_]+)"', text))
    assert set(re.findall(r"HUB_[A-Z_]+", (FOLDER / "README.md").read_text())) <= listed


def test_a_list_of_names_may_hold_anything(tmp_path):
    """Accounts are made for those that can be, on a machine that only writes down what it is told."""
    for name in ("getent", "groupadd", "useradd", "usermod", "chpasswd"):
        reads = "cat >/dev/null" if name == "chpasswd" else ""  # the others would take the names that are left
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" >> "{tmp_path}/done"\n{reads}\n')
    known = {"old": 1500, "daemon": 1}
    cases = "".join(f"  {name}) echo {uid};;\n" for name, uid in known.items())
    (tmp_path / "id").write_text(f'#!/bin/sh\ncase "$3" in\n{cases}  *) exit 1;;\nesac\n')
    for file in tmp_path.iterdir():
        file.chmod(0o755)
    names = "ada\r\n\nZoë\n  grace  \nold\n-u\ndaemon\nx,y\n../up\nAda\nlast"
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        [FOLDER / "accounts"], input=names, env=os.environ | {"PATH": path}, capture_output=True, text=True
    )
    assert [line.split(",")[0] for line in done.stdout.splitlines()] == ["ada", "grace", "last"]
    assert done.returncode == 1, "somebody has no account"
    assert all(word in done.stderr for word in ("Zoë", "'-u'", "'x,y'", "'../up'", "'Ada'", "daemon is an account of"))
    assert "old has an account already" in done.stderr
    made = [line.split()[-1] for line in (tmp_path / "done").read_text().splitlines() if line.startswith("user")]
    assert made == ["ada", "grace", "old", "last"]


def test_what_the_runbook_names_exists():
    runbook = (FOLDER / "README.md").read_text()
    assert all((FOLDER / link).exists() for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", runbook))
    assert all((FOLDER / name).stat().st_mode & stat.S_IXUSR for name in ("accounts", "collect"))
    version = re.search(r"configurable-http-proxy@(\S+)", runbook)[1]
    assert f'PROXY = "{version}"' in (ROOT / "tests" / "hub_server.py").read_text()
    chart = {re.search(r"--version (\S+)", text)[1] for text in (runbook, (FOLDER / "values.yaml").read_text())}
    assert len(chart) == 1
