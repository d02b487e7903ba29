"""On PYTHONPATH of every process of an SGLang under test: what it takes to run without a GPU.

The engine's scheduler is a process of its own, so this is where patches reach it.
"""

import importlib.abc
import importlib.util
import os
import sys

PATCHED = "sglang.srt.mem_cache.pool_host.mha"


class _AfterImport(importlib.abc.MetaPathFinder):
    """Patches one module once it was imported."""

    def find_spec(self, name, path=None, target=None):
        if name != PATCHED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            import cpu_transfers

            cpu_transfers.patch(module)

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("KVD_TEST_SGLANG"):
    import torch

    # torchvision's native part is built for GPUs and does not load; it registers kernels for
    # these at import, so they have to be declared.
    _operators = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _operators.define(_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    sys.meta_path.insert(0, _AfterImport())
