"""Builds an operator of kernels/cpu with ninja at first use and loads it, each operator a library of its own.

Promises: a library is published whole or not at all, however many processes build at once or are killed; a damaged or
foreign one is never loaded; a lock left behind costs seconds, never a hang. Environment read here, and only here:
CXX (the compiler), XDG_CACHE_HOME and LOCALAPPDATA (where the cache lies).
"""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rwkv_spec.errors import KernelError
from rwkv_spec.ops.publish import is_whole, publish

HEAD_SIZES = (16, 32, 48, 64, 80, 96, 112, 128)
# The compiled recurrences save the state before every 32nd token. Fewer tokens: more memory, and slower; more: a work
# space that leaves the second-level cache of small processors.
CHUNK_LENGTH = 32
HEADERS = (".hpp", ".cuh")
FLAGS = ("-std=c++17", "-O2", "-Wall", "-Wextra", f"-DCHUNK_LENGTH={CHUNK_LENGTH}")


class NoCompiler(KernelError):
    """There is nothing to compile with on this machine; the torch fallback still works."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: how to call it, what it calls itself, and all that it says of its version."""

    command: tuple[str, ...]
    name: str
    version_text: str


@dataclass(frozen=True)
class Recipe:
    """All that decides a library's bytes. `sizes`: one object of each source for each of these; 0 is no head size."""

    name: str
    compiler: Compiler
    flags: tuple[str, ...]
    sources: tuple[Path, ...]
    sizes: tuple[int, ...]

    @property
    def file_name(self) -> str:
        return f"rwkv_{self.name}.dll" if sys.platform == "win32" else f"rwkv_{self.name}.so"


@dataclass(frozen=True)
class Kernels:
    """A loaded operator. `remark` is empty, or one sentence on what the user may want to change."""

    library: ctypes.CDLL
    compiler: str
    instructions: str
    remark: str


def load_operator(name: str, check: Callable[[ctypes.CDLL], None]) -> Kernels:
    """The operator of kernels/cpu/NAME.cpp, built if need be. NoCompiler or KernelError if that cannot be.

    `check` tries a library that was just built and raises KernelError: compilers make mistakes, and a wrong sum trains.
    """
    return build_operator(name, find_compiler(), source_folder(), cache_folder(), check)


def build_operator(
    name: str, compiler: Compiler, folder: Path, cache: Path, check: Callable[[ctypes.CDLL], None]
) -> Kernels:
    """As load_operator, with everything given. Where the cache cannot be written a temporary folder takes its place."""

    recipe = Recipe(name, compiler, (*FLAGS, *machine_flags(compiler)), sources_of(name, folder), sizes_of(name))
    library, remark = load_recipe(recipe, cache, check)
    library.instructions.restype = ctypes.c_char_p
    return Kernels(library, compiler.name, library.instructions().decode(), remark)


def load_recipe(recipe: Recipe, cache: Path, check: Callable[[ctypes.CDLL], None]) -> tuple[ctypes.CDLL, str]:
    """The library of a recipe, from the cache or built, and a remark for the user ("" mostly)."""

    def build(target: Path) -> None:
        compile_into(target, recipe)
        # On Windows a library that was loaded could not be renamed any more.
        if sys.platform != "win32":
            check(open_library(target / recipe.file_name))

    place = cache / f"{recipe.name}-{build_key(recipe)}"
    try:
        if not is_whole(place, recipe.file_name):
            cache.mkdir(parents=True, exist_ok=True)
        return open_library(publish(place, recipe.file_name, build) / recipe.file_name), ""
    except OSError as error:
        remark = f"{cache} cannot be written ({error.strerror or error}), so each start builds anew; make it writable"
        return _build_for_once(recipe.file_name, build), remark


def _build_for_once(name: str, build: Callable[[Path], None]) -> ctypes.CDLL:
    """A library that lives as long as this process."""
    try:
        with tempfile.TemporaryDirectory(prefix="rwkv_spec-", ignore_cleanup_errors=True) as folder:
            build(Path(folder))
            return open_library(Path(folder) / name)
    except OSError as error:
        raise KernelError(
            f"the operators cannot be built in a temporary folder either: {error}; choose kernels: torch"
        ) from error


def open_library(path: Path) -> ctypes.CDLL:
    """The library as ctypes sees it; what the system's loader says against it becomes a KernelError."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelError(f"{path}: the compiled operators cannot be loaded: {error}; choose kernels: torch") from error


# ---- what to build with, from, and where to ----


def find_compiler() -> Compiler:
    """The compiler that CXX names, else the first of c++, g++ and clang++ on PATH."""
    given = os.environ.get("CXX", "").strip()
    if given:
        try:
            command = shlex.split(given, posix=os.name == "posix")
        except ValueError as error:
            raise KernelError(f"CXX={given}: {error}; correct or unset CXX, or choose kernels: torch") from error
        found = shutil.which(command[0])
        if found is None:
            raise KernelError(f"CXX={given}: there is no such compiler; correct or unset CXX, or choose kernels: torch")
        return _describe((found, *command[1:]), Path(found).stat().st_mtime_ns)
    for name in ("c++", "g++", "clang++"):
        found = shutil.which(name)
        if found is not None:
            try:
                return _describe((found,), Path(found).stat().st_mtime_ns)
            except KernelError:
                # macOS has a c++ that only asks for the developer tools.
                continue
    raise NoCompiler(f"no C++ compiler on PATH (looked for c++, g++, clang++); {how_to_get_a_compiler()}")


def how_to_get_a_compiler() -> str:
    """One imperative clause for this operating system."""
    if sys.platform == "darwin":
        return "get one with: xcode-select --install"
    if sys.platform == "win32":
        return "get one with: winget install -e --id BrechtSanders.WinLibs.POSIX.UCRT"
    for manager, command in (
        ("apt-get", "apt-get install g++"),
        ("dnf", "dnf install gcc-c++"),
        ("pacman", "pacman -S gcc"),
        ("zypper", "zypper install gcc-c++"),
        ("apk", "apk add g++"),
    ):
        if shutil.which(manager):
            return f"get one with: {command}"
    return "install g++ or clang++"


@functools.lru_cache(maxsize=8)
def _describe(command: tuple[str, ...], modified: int) -> Compiler:
    """Asks the compiler what it is; `modified` makes an exchanged compiler a new question."""
    result = call([*command, "--version"], what=command[0])
    text = result.stdout
    family = "clang" if "clang" in text.lower() else "g++"
    version = re.search(r"\d+\.\d+(\.\d+)?(?=\D*$)", text.partition("\n")[0])
    return Compiler(command, f"{family} {version.group() if version else ''}".strip(), text)


def source_folder(device: str = "cpu") -> Path:
    """The sources for a kind of device: inside an installed package, else in the checkout that it lies in."""
    package = Path(__file__).resolve().parents[1]
    places = (package / "_kernels" / device, package.parent / "kernels" / device)
    for place in places:
        if any(place.glob("wkv7.*")):
            return place
    raise KernelError(f"the operators' sources are in neither {places[0]} nor {places[1]}; install rwkv_spec again")


def cache_folder() -> Path:
    """This user's cache folder for compiled operators, as the platform has it."""
    given = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME", "")
    if given and Path(given).is_absolute():
        root = Path(given)
    elif sys.platform == "darwin":
        root = Path("~/Library/Caches").expanduser()
    else:
        root = Path("~/.cache").expanduser()
    return root / "rwkv_spec" / "kernels"


def machine_flags(compiler: Compiler) -> tuple[str, ...]:
    """What makes the compiler use all that this processor has, and what makes a library of the result."""
    machine = platform.machine().lower()
    native: tuple[str, ...] = ()
    if machine in ("x86_64", "amd64", "i686"):
        native = ("-march=native",)
        if compiler.name.startswith("g++"):
            # For some processors g++ leaves fused multiply-adds out of some loops and not of others: then a sum would
            # depend on where it is made, and a sequence on how it is cut.
            native += ("--param=avoid-fma-max-bits=0",)
    elif machine in ("arm64", "aarch64"):
        native = ("-mcpu=native",)
    return native if sys.platform == "win32" else (*native, "-fPIC")


def machine_text() -> str:
    """Which processor this is, so that machines that share a home folder don't share machine code."""
    text = f"{sys.platform} {platform.machine()} {platform.processor()}"
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if not line.strip():
                    break
                if line.split(":")[0].strip() in ("vendor_id", "model name", "flags", "Features", "CPU part"):
                    text += line
    except OSError:
        pass
    return text


def sizes_of(name: str) -> tuple[int, ...]:
    """The head sizes that an operator of kernels/cpu is compiled for; (0,) where it has none."""
    return HEAD_SIZES if name in ("wkv5", "wkv6", "wkv7") else (0,)


def sources_of(name: str, folder: Path) -> tuple[Path, ...]:
    """What an operator is made of: its own file, the one that says which instructions are used, and their headers."""
    return with_headers([folder / f"{name}.cpp", folder / "instructions.cpp"])


def with_headers(paths: Sequence[Path]) -> tuple[Path, ...]:
    """The files and all that they include from their own folder, by name."""
    found: list[Path] = []
    wanted = list(paths)
    while wanted:
        path = wanted.pop()
        if path not in found:
            found.append(path)
            included = re.findall(r'^#include "([\w.]+)"', path.read_text(encoding="utf-8"), re.MULTILINE)
            wanted += [path.parent / name for name in included]
    return tuple(sorted(found))


def build_key(recipe: Recipe) -> str:
    """A name for the library: equal only for equal sources, compiler, flags and processor."""
    digest = hashlib.sha256()
    for path in recipe.sources:
        digest.update(f"{path.name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    compiler = recipe.compiler
    for text in (*compiler.command, compiler.version_text, *recipe.flags, str(recipe.sizes), machine_text()):
        digest.update(f"{text}\0".encode())
    return digest.hexdigest()[:32]


# ---- compiling ----


def compile_into(folder: Path, recipe: Recipe) -> None:
    """Builds a library in `folder`, its parts side by side, and links them; nothing else is left there."""
    compiler, work = recipe.compiler, folder / "work"
    work.mkdir()
    objects, rules = [], ["rule compile", "  command = $cxx $flags $define -c $in -o $out", "rule link"]
    # A library for Windows carries the compiler's own runtime, which is on no other machine's PATH.
    static = " -static-libgcc -static-libstdc++" if sys.platform == "win32" else ""
    rules.append(f"  command = $cxx -shared -o $out $in{static}")
    for source in recipe.sources:
        shutil.copyfile(source, work / source.name)
        if source.suffix in HEADERS:
            continue
        # What no head size changes is compiled once.
        for size in recipe.sizes if source.stem == recipe.name else (0,):
            objects.append(f"{source.stem}_{size}.o")
            rules += [f"build {objects[-1]}: compile {source.name}", f"  define = -DHEAD_SIZE={size}"]
    quote = shlex.join if os.name == "posix" else subprocess.list2cmdline
    variables = {"cxx": quote(compiler.command), "flags": quote(recipe.flags)}
    lines = [f"{key} = {value.replace('$', '$$')}" for key, value in variables.items()]
    lines += [*rules, f"build {recipe.file_name}: link {' '.join(objects)}", ""]
    (work / "build.ninja").write_text("\n".join(lines), encoding="utf-8")
    result = call([_ninja(), "-C", str(work), "-j", str(os.cpu_count() or 1)], what="ninja", check=False)
    if result.returncode != 0:
        message = re.sub(r"^(ninja: .*|\[\d+/\d+\].*)\n?", "", result.stdout + result.stderr, flags=re.MULTILINE)
        if os.strerror(errno.ENOSPC) in message:
            # No fault of the compiler's: the caller knows of another place to build in.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        raise KernelError(
            f"{recipe.sources[0].parent}: compiling {recipe.name} with {compiler.name} failed; "
            f"try another compiler by CXX=..., or choose kernels: torch\n{message.strip()[:4000]}"
        )
    (work / recipe.file_name).replace(folder / recipe.file_name)
    shutil.rmtree(work, ignore_errors=True)


def _ninja() -> str:
    try:
        import ninja
    except ImportError:
        found = shutil.which("ninja")
        if found is None:
            raise KernelError("ninja is missing; pip install ninja, or choose kernels: torch") from None
        return found
    return str(Path(ninja.BIN_DIR) / "ninja")


def call(command: list[str], *, what: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            stdin=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C"},
        )
    except OSError as error:
        raise KernelError(f"{what} cannot be started: {error}; choose kernels: torch to go without it") from error
    if check and result.returncode != 0:
        said = (result.stderr or result.stdout).strip()[:1000] or "it said nothing"
        raise KernelError(
            f"{shlex.join(command)} failed (exit status {result.returncode}); choose another compiler, or kernels: "
            f"torch\n{said}"
        )
    return result


# ---- threads ----


@functools.lru_cache(maxsize=1)
def thread_pool() -> int | None:
    """The address of GOMP_parallel in the OpenMP runtime that torch has loaded; None: operators use one thread.

    The operators themselves link to no runtime. A second one in the process would keep threads of its own, and both
    would spin at their barriers for the same cores.
    """
    if not sys.platform.startswith("linux"):
        return None
    found = re.findall(r"(/.*/lib(?:gomp|iomp5|omp)[-.][^/\n]*)$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    # torch's own copy comes before one that another package has brought along.
    for path in sorted(dict.fromkeys(found), key=lambda path: "/torch" not in path):
        try:
            runtime = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            return ctypes.cast(runtime.GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None
