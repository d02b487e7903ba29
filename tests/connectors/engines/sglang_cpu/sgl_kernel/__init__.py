"""Stands in for SGLang's kernels, which have no build for the processor: a Llama calls none."""

__version__ = "0.4.10"


def missing(name):
    """Return a function that says that it is missing."""

    def kernel(*_, **__):
        raise NotImplementedError(f"no kernel {name} for the processor")

    kernel.__name__ = name
    return kernel


copy_all_layer_kv_cache_cpu = missing("copy_all_layer_kv_cache_cpu")


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return missing(name)
