"""Stand-in for torchvision, for importing only: any submodule or attribute resolves to a dummy class.

The torchvision wheel on offer is built against CUDA torch. SGLang and transformers import it for image models, which
are not used here.
"""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0.0.0+stub"
_ROOT = __name__
_INTERPOLATION = {"NEAREST": 0, "NEAREST_EXACT": 0, "LANCZOS": 1, "BILINEAR": 2, "BICUBIC": 3, "BOX": 4, "HAMMING": 5}


class _Dummy:
    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        raise RuntimeError(f"{_ROOT} is a stub")


class _Module(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Dummy,), dict(_INTERPOLATION))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith(_ROOT + "."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, _Finder())


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (_Dummy,), {})
