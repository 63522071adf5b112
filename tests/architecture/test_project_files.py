"""Nothing of one person's machine is in the tree, and shell scripts stop at the first error."""

import re
import shutil
import subprocess

import pytest
import yaml
from architecture.source_tree import ROOT, listed, project_files, relative, texts

_SLASH = "/"  # patterns are put together so that this file does not match them
_MACHINE_PATH = re.compile(rf"(?<![\w.$}}~-]){_SLASH}(?:work|root|home|Users|mnt|nix|opt){_SLASH}[\w.]")
_HOST = re.compile(r"https?://([\w.-]+)")
_INSTALLS = ("pyproject.toml", "requirements/", "scripts/", "docker/", ".ci/", "recipes/")
_PUBLIC_HOSTS = {"download.pytorch.org", "github.com", "arxiv.org", "localhost", "127.0.0.1"}
_REGISTRY = re.compile(
    r"(?:index-url|find-links|registry)[ =]+[\"']?(?:file:|https?://(?![\w.]*\.example\b))", re.IGNORECASE
)
"""An index given as an option; hosts below .example are reserved for documents and tests."""


def machine_paths(text: str, where: str) -> list[str]:
    """Absolute paths below a home folder, or of the place where this was written; an image may have its
    own."""
    if where.startswith("docker/"):
        return []
    return [f"{where}: {match.group()}…" for match in _MACHINE_PATH.finditer(text)]


def registries(text: str, where: str) -> list[str]:
    """Package indexes: anywhere as an option, and any host but the public ones in what installs."""
    found = [f"{where}: {match.group()}" for match in _REGISTRY.finditer(text)]
    if where.startswith(_INSTALLS):
        found += [f"{where}: host {host}" for host in _HOST.findall(text) if host not in _PUBLIC_HOSTS]
    return found


def unsafe_shell(text: str, where: str) -> list[str]:
    """Scripts that go on after an error."""
    head = [line for line in text.splitlines() if line and not line.startswith("#")][:1]
    return (
        [] if head == ["set -euo pipefail"] else [f"{where}: the first command must be `set -euo pipefail`"]
    )


def shell_scripts() -> list[tuple[str, str]]:
    return [
        (where, text)
        for where, text in texts(".sh", "")
        if text.startswith("#!/usr/bin/env bash") or where.endswith(".sh")
    ]


@pytest.mark.parametrize("check", [machine_paths, registries])
def test_no_trace_of_one_machine(check):
    violations = [
        v
        for where, text in texts()
        if where != "tests/architecture/test_project_files.py"
        for v in check(text, where)
    ]
    assert not violations, listed(violations)


def test_shell_scripts_stop_at_the_first_error():
    violations = [v for where, text in shell_scripts() for v in unsafe_shell(text, where)]
    assert not violations, listed(violations)


def test_shell_scripts_parse():
    bash = shutil.which("bash")
    for where, _ in shell_scripts():
        result = subprocess.run([bash, "-n", str(ROOT / where)], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr


def test_hooks_call_the_tools_of_the_environment_and_fetch_nothing():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repository["repo"] for repository in config["repos"]] == ["local"]
    hooks = [hook for repository in config["repos"] for hook in repository["hooks"]]
    assert {hook["language"] for hook in hooks} == {"system"}
    tests = (ROOT / "scripts" / "test.sh").read_text()
    tools = {hook["entry"].split()[0] for hook in hooks} - {"bash", "python"}
    assert tools == {"ruff", "mypy", "lint-imports"}
    assert [tool for tool in tools if tool not in tests] == []


def test_there_is_something_to_look_at():
    names = {relative(path) for path in project_files()}
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", ".pre-commit-config.yaml"} <= names
    assert {"pyproject.toml", "LICENSE", "scripts/install.sh", ".ci/run", "verl_rc/__init__.py"} <= names
    assert {where for where, _ in shell_scripts()} >= {"scripts/install.sh", "scripts/test.sh", ".ci/run"}


@pytest.mark.parametrize(
    ("check", "text", "where", "count"),
    [
        (machine_paths, "data in /home/anna/data and /home/bob/main", "README.md", 2),
        (machine_paths, "COPY . /opt/app", "docker/Dockerfile.cpu", 0),
        (
            machine_paths,
            "see verl_rc/work/ and https://a.b/home/x, ~/.cache, /tmp/x, /dev/shm",
            "README.md",
            0,
        ),
        (registries, "pip install --index-url https://mirror.test/simple x", "docs/x.md", 1),
        (registries, "PIP_FIND_LINKS=/path; --index-url $INDEX", "docs/x.md", 0),
        (registries, "https://pypi.test/simple", "scripts/install.sh", 1),
        (registries, "https://download.pytorch.org/whl/cpu", "scripts/install.sh", 0),
        (unsafe_shell, "#!/usr/bin/env bash\n# About.\nset -euo pipefail\necho x\n", "a.sh", 0),
        (unsafe_shell, "#!/usr/bin/env bash\nset -e\necho x\n", "a.sh", 1),
        (unsafe_shell, "#!/usr/bin/env bash\necho x\nset -euo pipefail\n", "a.sh", 1),
    ],
)
def test_the_checks_themselves(check, text, where, count):
    assert len(check(text, where)) == count
