"""Lets a torch that was built with CUDA, and installed without its libraries, start where there is no GPU.

They are two gigabytes, of which tests on CPUs call nothing. Usage: without_cuda.py FOLDER, that of torch's libraries,
which gets one library in place of them all: each function answers that there is no device.
"""

import re
import subprocess
import sys
from pathlib import Path

NO_DEVICE = 100
"""``cudaErrorNoDevice``."""
LIBRARY = re.compile(r"lib(cu|nccl|nv)\w*\.so\.\d+")
VERSIONED = re.compile(r"(\w+)@(lib(?:cu|nccl|nv)\w*\.so\.\d+|NVSHMEM)")
UNVERSIONED = re.compile(r"(?:nccl|cuFile|curand|cusparseLt)\w+")


def main(folder: Path) -> None:
    """Make the library and its names. A torch without CUDA needs none."""
    libraries = sorted(folder.glob("*.so"))

    def read(*command: str) -> list[str]:
        return subprocess.run([*command, *libraries], check=True, capture_output=True, text=True).stdout.splitlines()

    needed = {line.split("[")[-1].rstrip("]") for line in read("readelf", "--dynamic") if "(NEEDED)" in line}
    names = {name for name in needed if LIBRARY.fullmatch(name) and name != "libcuda.so.1"}  # that is the driver
    if not names:
        return
    undefined = {line.split()[-1] for line in read("nm", "--dynamic", "--undefined-only") if " U " in line}
    functions = {symbol for symbol in undefined if UNVERSIONED.fullmatch(symbol)}
    of_version: dict[str, list[str]] = {}
    for symbol in undefined:
        if found := VERSIONED.fullmatch(symbol):
            functions.add(found[1])
            of_version.setdefault(found[2], []).append(found[1])
    source, versions, made = (folder / f"no_cuda.{suffix}" for suffix in ("c", "map", "so"))
    source.write_text("".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in sorted(functions)))
    versions.write_text("".join(f"{version} {{ {'; '.join(of)}; }};\n" for version, of in of_version.items()))
    options = ["-w", "-shared", "-fPIC", "-fno-builtin", f"-Wl,--version-script={versions}"]
    subprocess.run(["gcc", *options, "-o", made, source], check=True)
    for name in names:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(made.name)


main(Path(sys.argv[1]))
