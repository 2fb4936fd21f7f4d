"""Stands in for the package of SGLang's CUDA kernels on a machine without a GPU.

SGLang imports names from `sgl_kernel` and its submodules when it starts, whatever the device. Here every name and
every submodule can be imported, and every kernel raises when it is called: nothing is computed in a kernel's place.
What a run on a CPU computes, it computes with torch's own operators (`--attention-backend torch_native`).

Such an engine also forks its scheduler and its detokenizer. SGLang spawns them, as CUDA does not survive a fork; each
of them then loads the same libraries once more, which is two thirds of what an engine's start costs on a CPU.
"""

import importlib.abc
import importlib.machinery
import multiprocessing
import sys
import types
from collections.abc import Sequence
from typing import Never

# the release whose names SGLang 0.5.23 expects; SGLang refuses to start beside an older one
__version__ = "0.4.10"


class MissingKernel:
    """A kernel, or a namespace of kernels, that only a GPU build has."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *arguments: object, **options: object) -> Never:
        raise NotImplementedError(
            f"{self._name} was called, which only the CUDA build of sgl_kernel has: "
            "start the engine with `--device cpu --attention-backend torch_native`, or use an image for GPUs"
        )

    def __getattr__(self, name: str) -> "MissingKernel":
        return _missing(f"{self._name}.{name}", last=name)


class MissingModule(types.ModuleType):
    """A submodule of which every public name is a missing kernel."""

    def __getattr__(self, name: str) -> MissingKernel:
        return _missing(f"{self.__name__}.{name}", last=name)


class SubmoduleFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `sgl_kernel.<anything>`, at any depth."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return MissingModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run: the names are made when they are asked for."""


def __getattr__(name: str) -> MissingKernel:
    return _missing(f"{__name__}.{name}", last=name)


def _missing(path: str, *, last: str) -> MissingKernel:
    if last.startswith("__"):  # the interpreter and inspect probe these: they must be absent, not kernels
        raise AttributeError(path)
    return MissingKernel(path)


_set_start_method = multiprocessing.set_start_method


def _set_fork(method: str | None, force: bool = False) -> None:
    """Take the place of `multiprocessing.set_start_method`, which SGLang calls before it starts its processes."""
    _set_start_method("fork" if method == "spawn" else method, force=force)


sys.meta_path.append(SubmoduleFinder())
multiprocessing.set_start_method = _set_fork
