"""Stand-in for `sgl_kernel.kvcacheio`, which SGLang up to 0.5.12 imports also where nothing moves KV caches."""


def __getattr__(name):
    if not name.startswith("transfer_kv_"):
        raise AttributeError(name)

    def kernel(*args, **kwargs):
        raise RuntimeError(f"sgl_kernel.kvcacheio.{name} is a stub")

    kernel.__name__ = name
    return kernel
