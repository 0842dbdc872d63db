"""The C kernel, compiled once on this machine with its own compiler and kept in the user's cache.

The file's name holds a hash of the source, the compiler's version, the flags and the processor's features, so a
changed compiler or another machine sharing the home folder builds its own. Nothing is built on import.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

SOURCE = Path(__file__).with_name("kernel.c")
FLAGS = [
    "-std=gnu11",
    "-O3",
    "-march=native",
    "-mprefer-vector-width=512",
    "-fopenmp-simd",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
]
"""No -ffast-math; no fused multiply-add either, so that each operation rounds as in the tensor reference."""

_lock = threading.Lock()
_state: dict[str, ctypes.CDLL | str | None] = {}


def cache_folder() -> Path:
    """`$TOOLKIT_CACHE`, or `qlora-toolkit` in the user's XDG cache folder."""
    if own := os.environ.get("TOOLKIT_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).expanduser() / "qlora-toolkit"


def library() -> ctypes.CDLL | None:
    """The loaded kernel, built if need be; `None` where there is none (`why_not` says why)."""
    if os.environ.get("TOOLKIT_NATIVE") == "0":
        return None
    with _lock:
        if "library" not in _state:
            try:
                _state["library"] = _declare(ctypes.CDLL(str(build())))
            except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                _state["library"] = None
                _state["reason"] = f"{error}"
        return _state["library"]  # type: ignore[return-value]


def why_not() -> str | None:
    """Why the native kernel is not used, in one line; `None` where it is."""
    if os.environ.get("TOOLKIT_NATIVE") == "0":
        return "the native kernel is turned off (TOOLKIT_NATIVE=0)"
    if library() is not None:
        return None
    return f"the native kernel was not built: {_state['reason']}"


def build(folder: Path | None = None) -> Path:
    """The compiled library's path; compiles it where it is not there yet.

    Raises:
        RuntimeError: no compiler, or it fails (its first line of complaint is given).
        OSError: the cache folder cannot be written.
    """
    compiler = _compiler()
    version = _run([*compiler, "--version"]).stdout
    folder = folder or cache_folder()
    source = SOURCE.read_bytes()
    complaint = ""
    # Some compilers for other processors know only -mcpu=native, or neither.
    for native in ("-march=native", "-mcpu=native", None):
        flags = [native if f == "-march=native" else f for f in FLAGS]
        flags = [f for f in flags if f is not None]
        key = "\0".join([*compiler, version, *flags, platform.machine(), _features()]).encode()
        path = folder / f"kernel-{hashlib.sha256(source + key).hexdigest()[:20]}.so"
        if path.exists():
            return path
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.stem}.", suffix=".so", dir=folder)
        os.close(handle)
        try:
            done = _run([*compiler, *flags, str(SOURCE), "-o", temporary])
            if done.returncode == 0:
                os.chmod(temporary, 0o755)
                os.replace(temporary, path)  # concurrent builders write the same file
                return path
            complaint = next((x for x in done.stderr.splitlines() if x.strip()), f"exit code {done.returncode}")
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
    raise RuntimeError(f"{compiler[0]} failed: {complaint}")


def _compiler() -> list[str]:
    given = os.environ.get("CC")
    for name in [given] if given else ["cc", "gcc", "clang"]:
        command = shlex.split(name)
        if command and shutil.which(command[0]):
            return command
    raise RuntimeError(f"$CC names {given!r}, which is not there" if given else "no C compiler (cc, gcc or clang)")


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60, check=False)


def _features() -> str:
    """What the processor can do, as the system lists it: a library built for more must not be loaded."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((x for x in lines if x.startswith(("flags", "Features"))), platform.processor())


def _declare(kernel: ctypes.CDLL) -> ctypes.CDLL:
    pointer, count, small = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    kernel.toolkit_scan.argtypes = [pointer, small, count, count, pointer, pointer, pointer]
    kernel.toolkit_absmax.argtypes = [pointer, small, count, count, count, count, pointer]
    kernel.toolkit_errors.argtypes = (
        [pointer, small, count, count, count, count]
        + [pointer] * 2
        + [
            small,
            pointer,
            pointer,
            pointer,
        ]
    )
    for function in (kernel.toolkit_scan, kernel.toolkit_absmax, kernel.toolkit_errors):
        function.restype = None
    return kernel
